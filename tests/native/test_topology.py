"""Goal: the machine is read as it is, on machines that we do not have.

Method: `MachineTree` writes the files of /proc and /sys as the kernel of that machine shows them;
`read_topology(root)` reads them instead of its own.
"""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import _native

GIB = 1024**3
V1_UNLIMITED = 9223372036854771712


class MachineTree:
    """A folder that holds another machine's /proc and /sys."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, path: str, text: object) -> "MachineTree":
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return self

    def write_status(self, cpus: str, nodes: str = "0") -> "MachineTree":
        return self.write(
            "/proc/self/status",
            f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n"
            f"Mems_allowed:\t1\nMems_allowed_list:\t{nodes}",
        )

    def write_cgroup(self, groups: str, mounts: str) -> "MachineTree":
        self.write("/proc/self/cgroup", groups)
        return self.write("/proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)

    def read(self) -> _native.Topology:
        return _native.read_topology(str(self.root))

    def advise(self) -> _native.ThreadAdvice:
        return _native.recommend_threads(self.read())


def test_free_memory_is_that_of_the_machine_or_of_the_tightest_group(tree: "MachineTree"):
    def read():
        return _native.read_free_memory(str(tree.root))

    assert read() is None
    tree.write("/proc/meminfo", f"MemTotal: {8 * 1024**2} kB\nMemAvailable: {4 * 1024**2} kB")
    assert read() == 4 * GIB
    tree.write_cgroup("0::/a/b", "2 1 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    group = "/sys/fs/cgroup/a"
    tree.write(f"{group}/memory.max", 3 * GIB).write(f"{group}/memory.current", 2 * GIB)
    assert read() == GIB
    files = f"anon {GIB}\nfile {GIB}\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\nshmem 7"
    tree.write(f"{group}/memory.stat", files)
    assert read() == GIB * 3 // 2, "file pages can be given up"
    tree.write(f"{group}/memory.max", "max")
    assert read() == 4 * GIB
    tree.write_cgroup("4:memory:/x", "2 1 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup memory\n")
    group = "/sys/fs/cgroup/memory/x"
    tree.write(f"{group}/memory.limit_in_bytes", GIB)
    tree.write(f"{group}/memory.usage_in_bytes", GIB // 2)
    tree.write(f"{group}/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 4}")
    assert read() == GIB * 3 // 4
    tree.write(f"{group}/memory.usage_in_bytes", 2 * GIB)
    assert read() == 0


@pytest.fixture
def tree(tmp_path: Path) -> MachineTree:
    return MachineTree(tmp_path)


def write_two_sockets(tree: MachineTree) -> MachineTree:
    """2 sockets of 32 cores with SMT: CPUs 0-31 and 64-95 on the first, the rest on the second."""
    cpus = "/sys/devices/system/cpu"
    tree.write(f"{cpus}/online", "0-127").write_status("0-127", "0-1")
    for cpu in range(128):
        first = cpu % 64
        tree.write(f"{cpus}/cpu{cpu}/topology/core_cpus_list", f"{first},{first + 64}")
        tree.write(f"{cpus}/cpu{cpu}/topology/physical_package_id", first // 32)
    for index, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "32K"), (2, "Unified", "2048K"),
         (3, "Unified", "61440K")]
    ):  # fmt: skip
        folder = f"{cpus}/cpu0/cache/index{index}"
        tree.write(f"{folder}/level", level).write(f"{folder}/type", kind)
        tree.write(f"{folder}/size", size)
    nodes = "/sys/devices/system/node"
    tree.write(f"{nodes}/online", "0-1")
    for node, ranges in enumerate(("0-31,64-95", "32-63,96-127")):
        tree.write(f"{nodes}/node{node}/cpulist", ranges)
        tree.write(
            f"{nodes}/node{node}/meminfo",
            f"Node {node} MemTotal:       {256 * 1024**2} kB\n"
            f"Node {node} MemFree:        {200 * 1024**2} kB",
        )
    tree.write(
        "/proc/meminfo",
        f"MemTotal: {512 * 1024**2} kB\nMemFree: 1 kB\nMemAvailable: {400 * 1024**2} kB",
    )
    tree.write("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    for size_kib, total, free in ((1048576, 64, 60), (2048, 0, 0)):
        folder = f"/sys/kernel/mm/hugepages/hugepages-{size_kib}kB"
        tree.write(f"{folder}/nr_hugepages", total).write(f"{folder}/free_hugepages", free)
    return tree


def test_two_socket_smt_host(tree: MachineTree):
    topology = write_two_sockets(tree).read()
    assert topology.num_online_cpus == 128
    assert len(topology.cores) == 64
    assert topology.cores[1] == [1, 65]
    assert topology.num_packages == 2
    assert [node.node_id for node in topology.numa_nodes] == [0, 1]
    assert topology.numa_nodes[1].cpus == [*range(32, 64), *range(96, 128)]
    assert topology.numa_nodes[0].memory_total_bytes == 256 * GIB
    assert topology.numa_nodes[0].memory_free_bytes == 200 * GIB
    assert topology.memory_available_bytes == 400 * GIB
    caches = topology.caches
    assert (caches.l1d_bytes, caches.l2_bytes, caches.l3_bytes) == (49152, 2097152, 62914560)
    assert topology.hugepages.transparent == "madvise"
    pools = [(p.page_size_bytes, p.num_pages, p.num_free) for p in topology.hugepages.pools]
    assert pools == [(2 * 1024**2, 0, 0), (GIB, 64, 60)]
    advice = _native.recommend_threads(topology)
    assert advice.threads == 64
    assert "64 physical cores" in advice.reason


def test_cpuset_limits_cores_and_nodes(tree: MachineTree):
    """Four CPUs of the second socket: two of one core, one alone, one second sibling alone."""
    write_two_sockets(tree).write_status("40,42,104,107", "1")
    topology = tree.read()
    assert topology.allowed_cpus == [40, 42, 104, 107]
    assert topology.cores == [[40, 104], [42], [107]]
    assert [(node.node_id, node.cpus) for node in topology.numa_nodes] == [(1, [40, 42, 104, 107])]
    assert topology.num_packages == 1
    assert _native.recommend_threads(topology).threads == 3


def test_memory_only_node_stays_where_allowed(tree: MachineTree):
    write_two_sockets(tree).write_status("0-3", "0-1")
    assert [(node.node_id, node.cpus) for node in tree.read().numa_nodes] == [
        (0, [0, 1, 2, 3]),
        (1, []),
    ]


V2_MOUNT = "35 30 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate"


def test_container_with_cpuset_and_v2_quota(tree: MachineTree):
    """A container with a cgroup namespace sees its own group as the root of the mount."""
    write_two_sockets(tree).write_status("8-11", "0").write_cgroup("0::/", V2_MOUNT)
    tree.write("/sys/fs/cgroup/cpu.max", "150000 100000")
    tree.write("/sys/fs/cgroup/memory.max", 8 * GIB)
    limits = tree.read().limits
    assert limits.cpu_quota == 1.5
    assert limits.memory_limit_bytes == 8 * GIB
    advice = tree.advise()
    assert advice.threads == 1
    assert "1.5" in advice.reason
    assert "/sys/fs/cgroup/cpu.max" in advice.reason


def test_v2_takes_the_tightest_ancestor(tree: MachineTree):
    tree.write_status("0-7").write_cgroup("0::/user.slice/app.service/child", V2_MOUNT)
    folder = "/sys/fs/cgroup/user.slice"
    tree.write(f"{folder}/app.service/child/cpu.max", "max 100000")
    tree.write(f"{folder}/app.service/cpu.max", "600000 100000")
    tree.write(f"{folder}/cpu.max", "125000 50000")
    tree.write(f"{folder}/app.service/memory.max", "max")
    tree.write(f"{folder}/memory.max", GIB)
    limits = tree.read().limits
    assert limits.cpu_quota == 2.5
    assert limits.cpu_quota_source == f"{folder}/cpu.max"
    assert limits.memory_limit_source == f"{folder}/memory.max"
    assert tree.advise().threads == 2


@pytest.mark.parametrize(("quota_us", "threads"), [(10_000, 1), (399_999, 3), (400_000, 4)])
def test_quota_is_rounded_down_and_at_least_one(tree: MachineTree, quota_us: int, threads: int):
    tree.write_status("0-7").write_cgroup("0::/", V2_MOUNT)
    tree.write("/sys/fs/cgroup/cpu.max", f"{quota_us} 100000")
    assert tree.advise().threads == threads


def test_quota_above_the_cores_changes_nothing(tree: MachineTree):
    tree.write_status("0-3").write_cgroup("0::/", V2_MOUNT)
    tree.write("/sys/fs/cgroup/cpu.max", "1600000 100000")
    advice = tree.advise()
    assert advice.threads == 4
    assert "quota" not in advice.reason


V1_MOUNTS = (
    "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 {root} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
)


@pytest.mark.parametrize("root", ["/", "/docker/abc"], ids=["host", "container"])
def test_v1_quota(tree: MachineTree, root: str):
    """Without a cgroup namespace a container's mount begins at its own group."""
    tree.write_status("0-7").write_cgroup(
        "4:memory:/docker/abc\n3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/docker/abc",
        V1_MOUNTS.format(root=root),
    )
    below = "/docker/abc" if root == "/" else ""
    cpu, memory = f"/sys/fs/cgroup/cpu,cpuacct{below}", f"/sys/fs/cgroup/memory{below}"
    tree.write(f"{cpu}/cpu.cfs_quota_us", 300000).write(f"{cpu}/cpu.cfs_period_us", 100000)
    tree.write(f"{memory}/memory.limit_in_bytes", 2 * GIB)
    limits = tree.read().limits
    assert limits.cpu_quota == 3.0
    assert limits.cpu_quota_source == f"{cpu}/cpu.cfs_quota_us"
    assert limits.memory_limit_bytes == 2 * GIB


def test_v1_without_limits(tree: MachineTree):
    tree.write_status("0-7").write_cgroup("2:cpu,cpuacct:/\n4:memory:/", V1_MOUNTS.format(root="/"))
    cpu = "/sys/fs/cgroup/cpu,cpuacct"
    tree.write(f"{cpu}/cpu.cfs_quota_us", -1).write(f"{cpu}/cpu.cfs_period_us", 100000)
    tree.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", V1_UNLIMITED)
    limits = tree.read().limits
    assert (limits.cpu_quota, limits.memory_limit_bytes) == (None, None)


def test_group_outside_the_namespace_reads_the_mount_point(tree: MachineTree):
    tree.write_status("0-7").write_cgroup("0::/../other", V2_MOUNT)
    tree.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert tree.read().limits.cpu_quota == 2.0


def test_mount_point_with_escaped_characters(tree: MachineTree):
    tree.write_status("0-7").write_cgroup("0::/", V2_MOUNT.replace("/sys/fs", r"/my\040groups"))
    tree.write("/my groups/cgroup/cpu.max", "200000 100000")
    assert tree.read().limits.cpu_quota == 2.0


def test_missing_files_give_one_plain_cpu(tree: MachineTree):
    topology = tree.read()
    assert topology.allowed_cpus == [0]
    assert topology.cores == [[0]]
    assert [(node.node_id, node.cpus) for node in topology.numa_nodes] == [(0, [0])]
    assert topology.hugepages.transparent == ""
    assert topology.limits.cpu_quota is None
    assert _native.recommend_threads(topology).threads == 1


def test_kernel_without_numa_is_one_node(tree: MachineTree):
    tree.write_status("0-3").write("/proc/meminfo", "MemTotal: 1024 kB\nMemFree: 512 kB")
    (node,) = tree.read().numa_nodes
    assert node.cpus == [0, 1, 2, 3]
    assert (node.memory_total_bytes, node.memory_free_bytes) == (1024 * 1024, 512 * 1024)


@given(text=st.text(alphabet="0123456789-,: \nmaxkB/\\[]", max_size=80))
def test_damaged_files_never_harm(tmp_path_factory: pytest.TempPathFactory, text: str):
    """Whatever the files hold, the invariants of a topology stand."""
    tree = MachineTree(tmp_path_factory.mktemp("damaged"))
    tree.write_cgroup("0::/", V2_MOUNT)
    for path in (
        "/proc/self/status", "/proc/meminfo", "/sys/devices/system/cpu/online",
        "/sys/devices/system/cpu/cpu0/topology/core_cpus_list", "/sys/devices/system/node/online",
        "/sys/devices/system/node/node0/cpulist", "/sys/fs/cgroup/cpu.max",
        "/sys/kernel/mm/transparent_hugepage/enabled",
    ):  # fmt: skip
        tree.write(path, text)
    topology = tree.read()
    assert topology.allowed_cpus
    assert sorted(cpu for core in topology.cores for cpu in core) == topology.allowed_cpus
    assert {cpu for node in topology.numa_nodes for cpu in node.cpus} == set(topology.allowed_cpus)
    assert 1 <= _native.recommend_threads(topology).threads <= len(topology.cores)


def test_this_machine_agrees_with_python():
    topology = _native.read_topology()
    assert topology.allowed_cpus == sorted(os.sched_getaffinity(0))
    assert topology.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
