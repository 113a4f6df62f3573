"""Instances that a launcher owns and several servers use: its roster, and both ends of it."""
