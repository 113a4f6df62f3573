"""Prefill on one instance, decode on another: how KV goes from the one to the other.

Decode pulls: it asks the prefill instance how far it is, READs blocks into its own as soon as a
layer of them is there, and takes a block only if the prefill instance says afterwards that it was
that block all the time. A prefill instance that is stopped therefore holds no memory of a decode
instance, and nothing depends on clocks that agree.
"""
