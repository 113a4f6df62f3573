"""Placement: the choice of operator, device and weight format for each part of a model. Pure."""
