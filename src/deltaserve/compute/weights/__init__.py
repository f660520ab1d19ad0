"""Weights in memory: read, dequantised, packed for the products that use them, and cut for a rank."""
