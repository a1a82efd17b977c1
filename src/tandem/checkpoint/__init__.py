"""Model files: where they are, packed ones, and those that others quantised."""
