"""How weights are stored: formats, blocks of codes, packed matrices."""
