"""Whole clusters in virtual time: the product's scheduler and policies, with models of the
hardware.
"""
