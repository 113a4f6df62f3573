"""A host of a store: the memory that it lends, and the disk behind it.

Other folders import from this package only. Start reading at ``host.py``; ``segment.py`` is the
memory, ``disk.py`` the disk.
"""

from tandem.store.host.disk import DiskTier
from tandem.store.host.disk_files import DiskFolder
from tandem.store.host.host import StoreHost
from tandem.store.host.orders import HostPort
from tandem.store.host.segment import HostSegment

__all__ = ["DiskFolder", "DiskTier", "HostPort", "HostSegment", "StoreHost"]
