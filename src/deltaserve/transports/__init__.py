"""Moving bytes between registered regions: one folder per library, each behind `core.transport`."""
