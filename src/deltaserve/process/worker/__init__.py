"""One worker process: its loop, step and transfer threads, and its ranks."""
