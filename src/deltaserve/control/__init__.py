"""Pure: every decision of a worker and of the front: what is cached, computed, moved, and where."""
