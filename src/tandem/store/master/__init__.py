"""The master of a store: the directory of objects, and the decisions about placement, eviction and
repair.

Other folders import ``master.py`` only.
"""
