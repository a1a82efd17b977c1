"""Devices put together for a loaded model: a module for each that `tandem.devices` names."""
