"""Operators, what runs them on each kind of device, and the float64 oracles.

An operator knows the shapes of its weights and how to read them from a ``WeightReader``; it does
not know what a transformers module is (``tandem.models`` builds operators from modules) nor where
a request comes from (``tandem.engine`` builds the ``PagedBatch`` of a step). How a step runs is
behind ``interfaces.Execution``, what a device does behind ``device.Device``: ``cpu`` has the native
implementation, ``torch`` the one for anywhere.
"""
