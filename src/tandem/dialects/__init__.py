"""How families of models write reasoning and calls of tools: prompts to write, answers to read."""
