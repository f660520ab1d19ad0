"""A model's layers as torch operators or native ones, composed by `decoder` for every family."""
