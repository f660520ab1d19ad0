"""Launchers that run the workers of `serve` on several machines."""
