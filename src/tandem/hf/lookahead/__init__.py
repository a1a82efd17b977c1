"""Asks the next layer's router ahead."""
