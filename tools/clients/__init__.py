"""Unmodified clients of other projects against a server of this one: a list of checks each, and a table of all."""
