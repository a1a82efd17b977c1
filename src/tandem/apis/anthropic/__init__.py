"""Anthropic's Messages API: a translation to and from the server's own chats."""
