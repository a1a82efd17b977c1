"""Describes the machine: cost profiles, processors, memory limits, disk, operating system."""
