"""Pure: page groups and their byte layout. Nobody else multiplies heads by itemsize."""
