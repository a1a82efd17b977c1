"""Benchmarks of the policies, and programs that make profiles and the report from sources."""
