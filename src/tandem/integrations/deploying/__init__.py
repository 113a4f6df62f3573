"""Deployment of a cluster that one file describes: as plain processes, as Kubernetes manifests, or
on Ray.
"""
