"""Bytes and streams: the host store, the executor and the events that it reports."""
