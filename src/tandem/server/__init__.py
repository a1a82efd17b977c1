"""The OpenAI-compatible server: HTTP in one process, the decode loop in another."""
