"""The costs of the hybrid runtime itself."""
