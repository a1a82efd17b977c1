"""This machine, measured for one model."""
