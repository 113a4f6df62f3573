"""Printing of plans of models on machines, and of hit rates of expert caches."""
