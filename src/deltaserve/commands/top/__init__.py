"""`deltaserve top`: what a running server is doing, as it does it."""
