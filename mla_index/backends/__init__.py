"""The built-in backends; each package declares here what `mla_index.registry.Backend` asks."""
