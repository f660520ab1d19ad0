"""Deltaserve: prefill and decode on separate workers, a radix cache on both, only the delta moved between them."""

__version__ = "0.1.0"
