"""Operators, their execution on each kind of device, and float64 oracles.

An operator knows the shapes of its weights and how to read them from a ``WeightReader``; it does
not know what a transformers module is (``tandem.models`` builds operators from modules) nor where
a request comes from (``tandem.engine`` builds the ``PagedBatch`` of a step).
``interfaces.Execution`` hides how a step runs, ``device.Device`` the operations of a device:
``cpu`` has the native implementation, ``torch`` one for any device.
"""
