"""Tokenizers of checkpoints: text to ids, and ids back to text piece by piece."""
