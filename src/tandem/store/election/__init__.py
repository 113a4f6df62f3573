"""The election of a store's master, and the roster, which outlives each master.

Other folders import from this package only, except ``etcd.py`` and ``etcd_roster.py``, which are
imported where etcd is used.
"""

from tandem.store.election.campaign import Campaign
from tandem.store.election.elected import ElectedMaster, Term
from tandem.store.election.election import Holder
from tandem.store.election.leader import PROBE_TIMEOUT_S, LeaderClient
from tandem.store.election.roster import (
    Member,
    MemoryRosterStore,
    Roster,
    RosterStore,
    RosterWriter,
    Tombstone,
    Tombstones,
)
from tandem.store.election.roster_file import FileRosterStore

__all__ = [
    "PROBE_TIMEOUT_S",
    "Campaign",
    "ElectedMaster",
    "FileRosterStore",
    "Holder",
    "LeaderClient",
    "Member",
    "MemoryRosterStore",
    "Roster",
    "RosterStore",
    "RosterWriter",
    "Term",
    "Tombstone",
    "Tombstones",
]
