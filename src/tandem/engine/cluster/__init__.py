"""Several instances that serve one model together: prefill and decode apart, or all alike.

``table`` and ``request_states`` decide what becomes of one request, ``selection`` which instances
it goes to; all three are pure. ``client`` runs them over processes.
"""
