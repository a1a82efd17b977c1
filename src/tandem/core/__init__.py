"""The modules that all other packages share: errors, units, registry, config."""
