"""Pure: the messages between front, prefill and decode, and their one codec."""
