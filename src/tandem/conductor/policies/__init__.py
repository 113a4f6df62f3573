"""Choices of instances: one module a policy, behind the interface ``Policy``."""
