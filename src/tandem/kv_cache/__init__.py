"""What a model keeps of each sequence: keys, values, index keys, states and their checkpoints."""
