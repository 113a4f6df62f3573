"""The rivals of benchmarks: how they are installed, and the scripts that run them."""
