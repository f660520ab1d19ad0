"""F2 (pure): a request's data and its transition tables, and the contract between front and engine."""
