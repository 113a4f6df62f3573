"""The sysfs tree of a host with 8 GPUs and 8 NICs, as an HGX H100 has it.

Two sockets; on each four PCIe switches below host bridges of their own, each switch with one GPU
and one ConnectX-7; besides, one slow management NIC on a socket and some clutter.
"""

from pathlib import Path

NUM_PAIRS = 8


def build_hgx_host(root: Path) -> None:
    """Write the tree below ``root``."""

    def write(path: str, text: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(path: str, target: str) -> None:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(root / target)

    for node in range(2):
        write(f"sys/devices/system/node/node{node}/cpulist", f"{node * 56}-{node * 56 + 55}")
    write("sys/devices/system/node/online", "0-1")
    for pair in range(NUM_PAIRS):
        node = pair // 4
        bus = 0x10 + pair * 0x18
        bridge = f"sys/devices/pci0000:{bus:02x}"
        switch = f"{bridge}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        gpu = f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0"
        nic = f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0"
        for device, vendor, class_ in ((gpu, "0x10de", "0x030200"), (nic, "0x15b3", "0x020000")):
            write(f"{device}/vendor", vendor)
            write(f"{device}/class", class_)
            write(f"{device}/numa_node", str(node))
            link(f"sys/bus/pci/devices/{Path(device).name}", device)
        net = f"{nic}/net/ib{pair}s"
        write(f"{net}/speed", "400000")
        write(f"{net}/operstate", "up")
        link(f"{net}/device", nic)
        link(f"sys/class/net/ib{pair}s", net)
        rdma = f"{nic}/infiniband/mlx5_{pair}"
        write(f"{rdma}/ports/1/link_layer", "InfiniBand" if pair else "Ethernet")
        link(f"{rdma}/device", nic)
        link(f"sys/class/infiniband/mlx5_{pair}", rdma)
    slow = "sys/devices/pci0000:00/0000:00:1c.0/0000:02:00.0"
    write(f"{slow}/vendor", "0x8086")
    write(f"{slow}/class", "0x020000")
    write(f"{slow}/numa_node", "0")
    write(f"{slow}/net/eno1/speed", "1000")
    write(f"{slow}/net/eno1/operstate", "up")
    link(f"{slow}/net/eno1/device", slow)
    link("sys/class/net/eno1", f"{slow}/net/eno1")
    link("sys/bus/pci/devices/0000:02:00.0", slow)
    write("sys/devices/virtual/net/lo/operstate", "unknown")
    link("sys/class/net/lo", "sys/devices/virtual/net/lo")
    write("sys/devices/virtual/net/docker0/operstate", "down")
    write("sys/devices/virtual/net/docker0/speed", "-1")
    link("sys/class/net/docker0", "sys/devices/virtual/net/docker0")
    write("sys/class/net/bonding_masters", "")
    for gpu in range(NUM_PAIRS):
        write(f"proc/driver/nvidia/gpus/{gpu}/information", "Model: NVIDIA H100 80GB HBM3")
    write("proc/self/fd/0", "")
    write("dev/nvidia-nvswitchctl", "")
    write("sys/class/nvme/nvme0/transport", "pcie")
    write("sys/class/nvme/nvme1/transport", "tcp")
