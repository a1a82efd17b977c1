"""Model files: finding them, packed checkpoints, and checkpoints quantised by others."""
