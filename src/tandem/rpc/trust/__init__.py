"""Permission to connect: keys, the gate of CURVE, the folder of Unix sockets."""
