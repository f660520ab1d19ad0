"""Attention over pages: one work list, several backends. `attention_choice` is their registry."""
