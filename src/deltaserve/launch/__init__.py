"""Turns settings into running processes: `serve`, `router`, `prefill`, `decode`, and the supervisor above them."""
