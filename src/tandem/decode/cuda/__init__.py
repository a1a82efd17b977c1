"""Sequences on a GPU: their slots, and steps as captured graphs."""
