"""The OpenAI-compatible HTTP front: bytes of a request in, validated generations to an Engine, answers out."""
