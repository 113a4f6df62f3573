"""Operators in torch, on any device; they run steps where there are no native kernels."""
