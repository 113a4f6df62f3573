"""The master of a store: who holds what, and what is to be done about it.

Other folders import ``master.py`` alone.
"""
