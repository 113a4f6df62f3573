"""Operators: device-independent faces, their torch implementations, and the float64 oracles.

An operator knows the shapes of its weights and how to read them from a ``WeightReader``; it does
not know what a transformers module is (``tandem.models`` builds operators from modules) nor where
a request comes from (``tandem.engine`` builds the ``PagedBatch`` of a step).
"""
