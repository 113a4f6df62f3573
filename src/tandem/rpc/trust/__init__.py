"""Permission to connect: keys, CURVE authentication, and the folder of Unix sockets."""
