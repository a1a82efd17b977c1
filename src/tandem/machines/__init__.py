"""Assembles devices for a loaded model: a module for each name in `tandem.devices`."""
