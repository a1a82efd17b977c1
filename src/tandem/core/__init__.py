"""What all floors share: errors, units, registry, config."""
