"""The hybrid expert runtime: store, cache, execution, measuring, tracing."""
