"""Division of a machine's cores between instances. Pure arithmetic; the caller measures."""

from collections.abc import Sequence

__all__ = ["divide_cores"]


def divide_cores(cores: Sequence[Sequence[int]], num_instances: int) -> list[tuple[int, ...]]:
    """Divide a machine's cores between instances, as evenly as whole cores allow.

    With fewer cores than instances, cores are assigned in rotation, so that consecutive instances
    of one role are on different cores; instances on one core wait for each other.

    Neighbours stay together, so that an instance spans as few NUMA nodes as possible; the SMT
    siblings of a core stay with one instance, since they share its units.

    Args:
        cores: the CPUs of each core, in the order of NUMA nodes.
        num_instances: at least one.

    Returns: the CPUs of each instance, sorted. Shares differ by at most one core; the first ones
        are the larger.
    """
    assert num_instances >= 1, "nobody to divide them between"
    assert cores, "a machine has a core"
    if num_instances > len(cores):
        return [tuple(sorted(cores[i % len(cores)])) for i in range(num_instances)]
    share, rest = divmod(len(cores), num_instances)
    shares: list[tuple[int, ...]] = []
    start = 0
    for instance in range(num_instances):
        end = start + share + (instance < rest)
        shares.append(tuple(sorted(cpu for core in cores[start:end] for cpu in core)))
        start = end
    return shares
