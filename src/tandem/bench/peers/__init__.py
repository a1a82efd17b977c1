"""Finds other programs for the same file, times them in turn with Tandem, and compares results."""
