"""Speculation: drafted tokens are verified together, and kept as far as they are the answer's."""
