"""Traffic from a seed, sent to a server, and what became of it in figures."""
