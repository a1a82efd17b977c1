"""Measures loading: time, memory, and the share of the disk's own speed."""
