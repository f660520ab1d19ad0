"""One file per model family: what its config.json means. Registered in core/branches.py."""
