"""Decisions: who computes an expert, what stays on the GPU, what is copied ahead. Pure, no clock.

Time is an argument, completions arrive as calls, randomness is injected; no torch, no numpy.
"""
