"""Dialects of the generating endpoints, a file each; `registry.py` names them."""
