"""Attention by FlashInfer's kernels, for CUDA devices."""
