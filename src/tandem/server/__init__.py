"""The server for OpenAI's and Anthropic's clients: HTTP here, the model in the engine process."""
