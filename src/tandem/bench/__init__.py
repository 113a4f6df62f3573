"""Benchmarks: ours and the baseline interleaved in one process, correctness first."""
