"""What the hybrid runtime costs by itself."""
