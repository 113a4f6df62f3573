"""Choice of operator, device and weight format for each part of a model: plain data in, a
plan out.
"""
