"""Reading files that an operator named: regular, bounded, and private where they hold a secret."""
