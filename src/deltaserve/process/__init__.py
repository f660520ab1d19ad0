"""Processes and what joins them: a worker's threads and ranks, links between workers, children, the front."""
