"""The state of a master: objects, hosts with their space, the order of its orders."""
