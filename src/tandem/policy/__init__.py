"""Decides where experts are computed, which of them stay on the GPU, and which are prefetched.

The code is pure and reads no clock: time is an argument, completions arrive as calls, randomness is
injected. It uses neither torch nor numpy.
"""
