"""F4 (pure): one engine's whole control plane: prefill, decode, unified."""
