"""Routed experts of the host on their way to a device, and the parts that both compute."""
