"""What computes: torch, kernels, and the memory that pages live in."""
