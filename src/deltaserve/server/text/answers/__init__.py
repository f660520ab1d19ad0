"""Formats of answers: how models write reasoning and calls of tools."""
