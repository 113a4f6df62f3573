"""Loading of a plan into a model that runs: skeleton, operators, packed weights."""
