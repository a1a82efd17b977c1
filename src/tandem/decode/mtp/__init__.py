"""MTP layers, which predict the token after the next one: each is a model of its own."""
