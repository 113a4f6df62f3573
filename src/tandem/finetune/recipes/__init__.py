"""Recipes of fine-tuning runs: their settings, the translation of keys, and the modules to
adapt.
"""
