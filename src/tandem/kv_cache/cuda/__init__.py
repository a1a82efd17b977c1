"""The KV cache of sequence slots on a GPU."""
