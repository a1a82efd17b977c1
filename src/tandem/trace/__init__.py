"""Routing traces on disk: which experts a model's routers chose, token by token (file format 1)."""

from tandem.trace.routing import RoutingTrace, TraceMeta
from tandem.trace.store import read_trace, write_trace

__all__ = ["RoutingTrace", "TraceMeta", "read_trace", "write_trace"]
