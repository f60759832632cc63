"""The parts of the MTP lane."""
