"""Small checkpoints in published layouts, and the scripts that made them. Not installed, imported by no room."""
