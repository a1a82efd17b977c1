"""Speed and accuracy of generation, beside other systems and the machine's ceilings."""
