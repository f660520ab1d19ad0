"""How processes talk. Worker links over ZeroMQ, and the private channel between a supervisor and its children."""
