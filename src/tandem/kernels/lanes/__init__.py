"""How routed experts of the host come to a device, and what host and device compute of a layer."""
