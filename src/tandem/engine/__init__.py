"""The engine process: holds the model, steps its requests, and speaks to the server by a pipe."""
