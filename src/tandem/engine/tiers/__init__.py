"""Tiers of KV below the device: blocks are stored in them and loaded from them, as a planner
decides.

L1 is the KV blocks in the engine's own memory, L3 is the KV store (``tandem.store``). If the device
is a GPU, pinned host memory between the two is L2.
"""
