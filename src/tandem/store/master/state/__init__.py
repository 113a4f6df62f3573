"""The state of a master: objects, hosts with their space, and the orders sent to them."""
