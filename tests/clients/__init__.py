"""Clients of other projects, each in its own environment: python -m tests.clients."""
