"""Mixers with a state and their projections: Kimi delta attention, Mamba2, short convolutions."""
