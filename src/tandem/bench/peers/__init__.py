"""Finds other programs for the same file, times them in turns with Tandem, and compares results."""
