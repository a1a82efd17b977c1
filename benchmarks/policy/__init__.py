"""Benchmarks of the policies, and the programs that make profiles and the report from sources."""
