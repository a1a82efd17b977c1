"""The costs of operations on one machine: profiles and their files."""
