"""One simulated world for the tests of all components that span several processes.

Virtual time (``loop``), processes that can be killed and stopped (``process``), a network that
loses, delays and duplicates messages (``network``) and a disk with faults (``disk``), all driven by
one seed (``world``). The product's classes run in it unchanged; only clock, control channel and
data path are replaced by models that fail more often than the real ones. Imports no torch.
"""

from tandem.sim.disk import MemoryDisk, MemoryPort
from tandem.sim.loop import DriftingClock, LoopClock, VirtualLoop, run_virtual
from tandem.sim.network import Session
from tandem.sim.process import Process
from tandem.sim.world import Faults, World

__all__ = [
    "DriftingClock",
    "Faults",
    "LoopClock",
    "MemoryDisk",
    "MemoryPort",
    "Process",
    "Session",
    "VirtualLoop",
    "World",
    "run_virtual",
]
