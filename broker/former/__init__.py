"""The daemon that forms cohorts out of waiting requests, and the pure rules it decides by."""
