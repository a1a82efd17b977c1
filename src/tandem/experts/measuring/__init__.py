"""Measures what things cost on this machine."""
