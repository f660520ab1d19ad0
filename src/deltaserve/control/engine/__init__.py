"""Pure: a worker's whole control plane, the engine: prefill, decode, unified."""
