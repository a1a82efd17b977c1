"""The hybrid expert runtime: store, cache, execution, devices, measuring, tracing."""
