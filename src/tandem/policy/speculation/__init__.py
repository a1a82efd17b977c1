"""Decides how many drafted tokens a step verifies, without models or clocks."""
