"""Decode steps as recorded graphs: recorded, compared with the model's own steps, then replayed."""
