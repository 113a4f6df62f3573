"""The operators that models are made of."""
