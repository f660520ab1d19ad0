"""Attention by Triton kernels, for CUDA devices."""
