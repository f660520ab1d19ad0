"""`deltaserve doctor`: what works here and what does not, before a server starts."""
