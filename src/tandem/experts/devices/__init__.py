"""What can compute experts beside the CPU."""
