"""How model families write reasoning and tool calls, for writing prompts and reading answers."""
