"""Ollama's API: a translation to and from the server's own chats and completions."""
