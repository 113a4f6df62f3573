"""Workloads of a server: traces of requests, records of a run, and figures computed from them."""
