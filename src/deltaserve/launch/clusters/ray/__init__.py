"""Ray as launcher."""
