"""`deltaserve chat`: a conversation in the terminal."""
