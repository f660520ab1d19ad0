"""F0 (pure): ids, errors, sampling parameters, extents, page keys, config: the words every other package speaks."""
