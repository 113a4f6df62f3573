"""Float64 oracles of the operators, which tests and benches compare kernels with."""
