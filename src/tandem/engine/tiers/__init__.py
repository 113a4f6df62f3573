"""Tiers of KV below the device: storing and loading blocks, and the planner that decides.

L1 is the engine's own blocks; L3 is the store (``tandem.store``). L2, pinned host memory, has its
place between them where the device is a GPU.
"""
