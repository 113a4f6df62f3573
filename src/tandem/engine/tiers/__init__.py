"""Tiers of KV below the device: blocks are stored in them and loaded from them, as a planner
decides.

L1 is the engine's own blocks, L3 is the store (``tandem.store``). If the device is a GPU, pinned
host memory between them is L2.
"""
