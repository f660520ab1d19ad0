"""Benchmark any OpenAI-compatible server. Traffic is data made from a seed; the client sends it and times it."""
