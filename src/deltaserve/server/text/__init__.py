"""Text to token ids and back: a model's tokenizer, chat template and detokenizer, from its folder or GGUF file."""
