"""Storage of weights: formats, blocks of codes, packed matrices."""
