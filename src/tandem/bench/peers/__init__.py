"""Other programs on the same file: found, run in turns with Tandem, and compared."""
