"""Attention by torch operators: what the other backends are compared with, and what runs anywhere."""
