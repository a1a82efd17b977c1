"""Sequence slots on a GPU, and decode steps as captured graphs."""
