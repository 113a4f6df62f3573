"""Float64 oracles of the operators; tests and benchmarks compare kernels with them."""
