"""The server's HTTP side, for OpenAI's, Anthropic's and Ollama's clients."""
