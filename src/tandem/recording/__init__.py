"""A decode step as a recorded graph: recorded once, compared, then replayed."""
