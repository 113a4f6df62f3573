"""The scheduler of an instance: it plans which tokens each step computes and in which KV blocks."""
