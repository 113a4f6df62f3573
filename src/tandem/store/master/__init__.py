"""The master of a store: the directory of objects, and the decisions about them.

Other folders import ``master.py`` alone.
"""
