"""One simulated world for the tests of everything that is spread over processes.

Virtual time (``loop``), processes that are killed and stopped (``process``), a network that loses,
delays and doubles (``network``), a disk that lies (``disk``), all of it drawn from one seed
(``world``). The classes of the product run in it unchanged; only clock, control channel and data
path are models, each worse than the real one. It loads no torch.
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
