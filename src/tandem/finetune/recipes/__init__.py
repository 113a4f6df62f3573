"""Recipes: their keys, and what they name."""
