"""The engine process: holds the model, steps its requests, talks to the server through a pipe."""
