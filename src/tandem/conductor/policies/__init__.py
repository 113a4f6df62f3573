"""Routing policies, which choose instances: one module each, behind the interface ``Policy``."""
