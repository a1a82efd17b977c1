"""Speed and accuracy of generation, beside others and beside the machine's ceilings."""
