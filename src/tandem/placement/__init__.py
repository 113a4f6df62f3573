"""The operator, device and format of each part of a model: plain data in, a plan out."""
