"""Attention by the native library, on a CPU."""
