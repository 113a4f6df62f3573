"""What a server and its children use: processes, memory, descriptors, shared memory."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


def list_tree(root):
    """Command lines of a process and its descendants, by process id."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(*GONE):
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
                commands[int(entry.name)] = (entry / "cmdline").read_text()
    found, edge = {root: commands.get(root, "")}, [root]
    while edge:
        parent = edge.pop()
        for pid, its_parent in parents.items():
            if its_parent == parent and pid not in found:
                found[pid] = commands[pid]
                edge.append(pid)
    return found


@dataclass(frozen=True)
class Usage:
    """Sums over a server and its children."""

    num_processes: int
    pss_mib: float
    num_descriptors: int
    num_segments: int
    """Mappings of memory files and of /dev/shm, over all processes."""


def measure_usage(root):
    pss_kib, num_descriptors, num_segments = 0, 0, 0
    tree = list_tree(root)
    for pid in tree:
        with contextlib.suppress(*GONE):
            proc = Path("/proc") / str(pid)
            num_descriptors += len(list((proc / "fd").iterdir()))
            for line in (proc / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    pss_kib += int(line.split()[1])
            maps = (proc / "maps").read_text().splitlines()
            num_segments += sum("/memfd:" in line or "/dev/shm/" in line for line in maps)
    return Usage(len(tree), pss_kib / 1024, num_descriptors, num_segments)
