"""Measures the costs of operations on this machine."""
