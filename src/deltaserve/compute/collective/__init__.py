"""Ranks of one worker exchanging tensors: all-reduce over shared memory or NCCL, and expert groups."""
