"""State spaces: Mamba2 and short convolutions, in every form: native, torch, float64."""
