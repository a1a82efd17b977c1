"""The words that every floor shares: errors, units, registry, config."""
