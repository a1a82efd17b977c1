"""The server's costs and limits."""
