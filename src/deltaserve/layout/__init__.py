"""F1 (pure): page groups and their byte layout. Nobody else multiplies heads by itemsize."""
