"""Real clients of other projects, each in an environment of its own: python -m tests.clients."""
