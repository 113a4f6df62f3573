"""Which NIC is near which memory, on a host of 8 GPUs and 8 NICs that a test writes to a folder."""

import time

import msgspec
import pytest
from hgx_host import build_hgx_host
from tests_transfer_world import move
from two_hosts import BENCHMARK_BLOCKS

from tandem._native import RailSet, RailState, list_interfaces
from tandem.core.errors import ConfigError
from tandem.transfer import TransferConfig
from tandem.transfer.nics import plan_nics
from tandem.transfer.probes import probe_transports
from tandem.transfer.topology import Nic, Topology, read_topology


@pytest.fixture
def hgx(tmp_path):
    build_hgx_host(tmp_path)
    return read_topology(tmp_path)


def test_devices_are_found(hgx):
    assert hgx.numa_nodes == (0, 1)
    assert [nic.name for nic in hgx.nics] == ["eno1", *(f"ib{i}s" for i in range(8))]
    assert hgx.nic("ib5s") == Nic(
        name="ib5s",
        speed_gbps=400.0,
        numa_node=1,
        pci_path=("pci0000:88", "0000:88:01.0", "0000:89:00.0", "0000:8a:01.0", "0000:8c:00.0"),
        rdma_device="mlx5_5",
        is_up=True,
    )
    assert hgx.nic("eno1").speed_gbps == 1.0
    assert [(gpu.index, gpu.numa_node, gpu.vendor) for gpu in hgx.gpus] == [
        (i, i // 4, "nvidia") for i in range(8)
    ]


@pytest.mark.parametrize("gpu", range(8))
def test_gpu_memory_has_its_own_nic_then_those_of_its_socket(hgx, gpu):
    near, node, rest = hgx.tiers(f"cuda:{gpu}")
    assert near == [f"ib{gpu}s"]
    socket = range(4) if gpu < 4 else range(4, 8)
    assert node == ["eno1"] * (gpu < 4) + [f"ib{i}s" for i in socket if i != gpu]
    assert len(near) + len(node) + len(rest) == 9
    assert not set(rest) & {*near, *node}


def test_host_memory_has_the_nics_of_its_node(hgx):
    near, middle, rest = hgx.tiers("cpu:1")
    assert near == [f"ib{i}s" for i in range(4, 8)]
    assert middle == []
    assert rest == ["eno1", *(f"ib{i}s" for i in range(4))]


@pytest.mark.parametrize("location", ["*", "cpu:7", "cuda:8", "cuda:x", "cpu", ""])
def test_unknown_place_prefers_nothing(hgx, location):
    assert hgx.tiers(location)[:2] == ([], [])
    assert len(hgx.tiers(location)[2]) == 9


def test_json_is_a_way_back_and_says_the_tiers(hgx):
    text = hgx.to_json()
    assert Topology.from_json(text) == hgx
    shown = msgspec.json.decode(text)
    assert shown["tiers"]["cuda:3"][0] == ["ib3s"]
    for bad in (b"", b"[]", b'{"nics": [{"nam": 1}]}', b'{"nisc": []}', b"\xff"):
        with pytest.raises(ConfigError):
            Topology.from_json(bad)


def test_nothing_is_known_of_an_empty_folder(tmp_path):
    assert read_topology(tmp_path) == Topology()
    (tmp_path / "sys/class/net/x0").mkdir(parents=True)
    (tmp_path / "sys/class/net/x0/speed").write_bytes(b"\xff\x00-12")
    (tmp_path / "sys/class/net/x0/operstate").mkdir()  # Reading fails, as drivers do.
    assert read_topology(tmp_path) == Topology()


def test_single_node_without_numa_information_is_near():
    topology = Topology(nics=(Nic(name="eth0"),))
    assert topology.tiers("cpu:0") == (["eth0"], [], [])


def test_a_file_stands_in_for_the_look(world, tmp_path):
    path = tmp_path / "topology.json"
    path.write_bytes(Topology(nics=(Nic(name="lo", speed_gbps=2.5, numa_node=0),)).to_json())
    engine = world.engine(topology_file=str(path), local_addresses=("127.0.0.1",))
    assert engine.topology.nics[0].speed_gbps == 2.5
    segment = engine.open(world.engine().address)
    assert segment.rails[0].bandwidth_bytes_per_s == 2.5e9 / 8
    path.write_text("{")
    with pytest.raises(ConfigError):
        world.engine(topology_file=str(path))
    with pytest.raises(ConfigError, match=r"none\.json"):
        world.engine(topology_file=str(tmp_path / "none.json"))


def test_plan_follows_addresses_and_locations():
    topology = Topology(
        numa_nodes=(0, 1), nics=(Nic(name="lo", speed_gbps=40.0, numa_node=1), Nic(name="other"))
    )
    plan = plan_nics(
        TransferConfig(local_addresses=("127.0.0.1", "198.51.100.7"), nic_weight=2), topology
    )
    assert plan.rail_gbps == [40.0, 10.0]
    assert plan.penalties == {"cpu:0": [4.0, 1.0], "cpu:1": [1.0, 1.0]}
    assert [board.split("-")[1] for board in plan.quota_boards] == ["lo", "any"]
    assert plan_nics(TransferConfig(rail_gbps=(5,)), topology).rail_gbps == [5]


def test_near_rail_is_chosen_until_it_is_loaded():
    """The ranking reaches the decider: distance decides when idle, load when busy."""
    rails = RailSet(min_slice_bytes=65536, max_slice_bytes=65536)
    for index in range(2):
        rails.add_rail(1e9)
        rails.on_connect(index, 0)
        rails.set_penalty(index, 1, 1.0 if index == 1 else 4.0)
        rails.set_penalty(index, 2, 1.0 if index == 0 else 4.0)
    total = 64 * 65536
    assert rails.choose(0, total, total, 1).rail == 1
    assert rails.choose(0, total, total, 2).rail == 0
    picks = [rails.choose(0, total, total, 1).rail for _ in range(12)]
    assert picks[:2] == [1, 1]
    assert 0 in picks  # The near one is loaded by now.
    with pytest.raises(ConfigError):
        rails.set_penalty(0, 0, 1.0)
    with pytest.raises(ConfigError):
        rails.set_penalty(0, 1, 0.0)


def test_every_transport_that_the_field_names_is_listed(tmp_path):
    bare = {report.name: report for report in probe_transports(tmp_path)}
    assert set(bare) == {
        "tcp", "shm", "cma", "io_uring", "rdma_roce", "rdma_ib", "rdma_erdma", "nvlink", "mnnvl",
        "cxl", "gds", "nvmeof", "ascend",
    }  # fmt: skip
    assert all(report.detail for report in bare.values())
    assert bare["rdma_ib"].state == bare["nvlink"].state == bare["shm"].state == "absent"
    build_hgx_host(tmp_path)
    found = {report.name: report for report in probe_transports(tmp_path)}
    assert found["rdma_ib"].state == "unsupported"
    assert "mlx5_7" in found["rdma_ib"].detail
    assert "mlx5_0" in found["rdma_roce"].detail
    assert found["nvlink"].state == "unsupported"
    assert found["gds"].state == found["mnnvl"].state == "absent"
    assert found["nvmeof"].state == "present"
    assert "nvme1 (tcp)" in found["nvmeof"].detail
    assert found["shm"].state == "present"


def test_memory_goes_over_the_nic_near_it(world, tmp_path):
    """From the location of a buffer to the rail that carries it, through the engine."""
    others = [
        (name, address)
        for name, address in list_interfaces()
        # Not the shaped links of two hosts that another run of these tests may be cutting.
        if name != "lo" and "." in address and not address.startswith(BENCHMARK_BLOCKS)
    ]
    if not others:
        pytest.skip("no second interface with an IPv4 address")
    name, address = others[0]
    topology = Topology(
        numa_nodes=(0, 1),
        nics=(
            Nic(name="lo", speed_gbps=10.0, numa_node=0),
            Nic(name=name, speed_gbps=10.0, numa_node=1),
        ),
    )
    path = tmp_path / "topology.json"
    path.write_bytes(topology.to_json())
    giver = world.engine(listen=("127.0.0.1:0", f"{address}:0"))
    taker = world.engine(
        transports=("tcp",), topology_file=str(path), local_addresses=("127.0.0.1", address)
    )
    remote = giver.allocate(65536)
    anywhere = taker.register(bytearray(65536))

    ours = [taker.register(bytearray(65536), location=f"cpu:{node}") for node in (0, 1)]

    def goes_near() -> bool:
        with taker.open(giver.address) as segment:  # Its rails have no past.
            limit = time.monotonic() + 60
            while not all(rail.state == RailState.HEALTHY for rail in segment.rails):
                assert time.monotonic() < limit
                time.sleep(0.001)
            for _ in range(150):  # Both become known.
                move(taker, segment, 1, anywhere, remote.offset, 65536)
            for near in (0, 1, 0, 1):  # By chance it would not change with the location.
                before = [rail.bytes_moved for rail in segment.rails]
                for _ in range(40):
                    move(taker, segment, 1, ours[near], remote.offset, 65536)
                moved = [r.bytes_moved - b for r, b in zip(segment.rails, before, strict=True)]
                if moved[near] <= 2 * moved[1 - near]:
                    return False
            return True

    # A busy machine may make a rail look slow, and that for seconds: the next try has fresh ones.
    limit = time.monotonic() + 60
    while not goes_near():
        assert time.monotonic() < limit, "no run of moves followed the locations"
