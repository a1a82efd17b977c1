"""OpenAI's Responses API: a translation to and from the server's own chats."""
