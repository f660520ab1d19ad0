"""From settings to running processes: `serve`, `router`, `prefill`, `decode`, and the supervisor above them."""
