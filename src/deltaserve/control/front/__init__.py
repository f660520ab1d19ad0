"""Pure: the front's control plane: worker registry, residency, cost estimate, pair choice, retry, rooms."""
