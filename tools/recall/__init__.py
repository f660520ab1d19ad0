"""The recall micro-model: a small Qwen3 trained to answer questions about the document in its context."""
