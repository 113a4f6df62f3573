"""Which operator, device and format each part of a model gets: plain data in, a plan out."""
