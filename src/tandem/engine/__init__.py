"""The engine process: holds the model, steps its requests, and talks to the server through a
pipe.
"""
