"""Vectors of prompts: embeddings, scores of pairs and rankings, in the forms of several APIs."""
