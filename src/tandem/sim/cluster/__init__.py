"""Whole clusters in virtual time: the product's scheduler and policies over models of machines."""
