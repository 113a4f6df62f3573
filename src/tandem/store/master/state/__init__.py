"""What a master knows: objects, hosts with their space, the order of what it tells them."""
