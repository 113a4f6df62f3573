"""A model as plain data: what its layers compute, and how they are stored and run."""
