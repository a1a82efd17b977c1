"""Compares `tandem plan` with real runs, for random configurations."""
