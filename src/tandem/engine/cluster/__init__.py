"""Several instances that serve one model together: either all doing the same work, or some only
prefill and others only decode.

``table`` and ``request_states`` decide the next action for one request; both are pure.
``dispatcher`` carries out the actions, and ``client`` manages the processes of the instances.
"""
