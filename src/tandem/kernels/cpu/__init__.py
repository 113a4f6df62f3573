"""Operators on the CPU: the native core runs the steps, and holds matrices and experts packed."""
