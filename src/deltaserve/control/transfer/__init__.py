"""Pure: the ticket protocol: who may write where, what has landed, and when pages may be used again."""
