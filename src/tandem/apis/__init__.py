"""Translates each API: bodies become generation requests, and token outputs become answers."""
