"""The words that every floor shares: ids, errors, units, registry, config."""
