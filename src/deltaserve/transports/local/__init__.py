"""Transport between workers of one machine: the reader copies from memory that the writer shares."""
