"""F4: what a model computes: config.json -> ModelSpec, weights by name, one decoder for all families."""
