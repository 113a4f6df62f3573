"""Printing plans of models over machines, and rates of caches of experts."""
