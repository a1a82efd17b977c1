"""All experts of a model, in host memory."""
