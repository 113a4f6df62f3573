"""Operators in torch, on any device: what runs a step where there are no native kernels."""
