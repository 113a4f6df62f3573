"""A model as plain data: its layers, and how they are stored and run."""
