"""Goal: cores are divided whole, evenly and completely. Method: any machine, any number."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.placement.cores import divide_cores


@given(
    siblings=st.integers(1, 2),
    num_cores=st.integers(1, 64),
    data=st.data(),
)
def test_each_core_goes_whole_to_one_instance(siblings, num_cores, data):
    num_instances = data.draw(st.integers(1, num_cores))
    # As Linux numbers siblings: the second of each core after the first of all.
    cores = [[core + num_cores * k for k in range(siblings)] for core in range(num_cores)]
    shares = divide_cores(cores, num_instances)
    assert len(shares) == num_instances
    assert sorted(cpu for share in shares for cpu in share) == list(range(num_cores * siblings))
    owners = [
        {i for i, share in enumerate(shares) if cpu in share} for core in cores for cpu in core
    ]
    assert all(len(owner) == 1 for owner in owners)
    for core in cores:
        assert any(set(core) <= set(share) for share in shares)
    sizes = [len(share) // siblings for share in shares]
    assert max(sizes) - min(sizes) <= 1
    firsts = [min(c for c in share if c < num_cores) for share in shares]
    assert firsts == sorted(firsts), "neighbours stay together"


def test_more_instances_than_cores_take_turns():
    """Two of each role on two cores: a core has one that prefills and one that decodes."""
    assert divide_cores([[0, 2], [1, 3]], 4) == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert divide_cores([[5]], 3) == [(5,)] * 3
