"""Latents in a file: rows on disk, those in memory, and attention of the rows that a step chose."""
