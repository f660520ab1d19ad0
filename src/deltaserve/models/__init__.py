"""F4: what a model computes: checkpoint -> ModelSpec, weights by name, one decoder for all families."""
