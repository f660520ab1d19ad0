"""Pure: every option of every command, the rules between them, and what follows from them."""
