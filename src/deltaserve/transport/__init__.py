"""F1: move bytes between registered regions. `base` is the seam; one adapter file per library."""
