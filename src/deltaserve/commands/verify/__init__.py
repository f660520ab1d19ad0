"""`deltaserve verify`: a server's tokens and logprobs against transformers."""
