"""What is kept for each sequence: keys, values, index keys, states and their checkpoints."""
