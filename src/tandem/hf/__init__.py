"""The seam with Transformers: config, quantizer, experts function, loading and saving."""
