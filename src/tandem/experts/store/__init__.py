"""All experts, once, in host memory."""
