"""A device's expert cache: slots, copies, what it starts with."""
