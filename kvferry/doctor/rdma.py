"""RDMA devices as the kernel shows them: ports, their state, their GIDs, and whether network cards reach a GPU's memory."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.doctor.finding import Finding, ok, read_line, warn

_FIRST_DMABUF_KERNEL: Final = (5, 12)
"""Linux from which a network card can be given a GPU's memory as a dma-buf."""
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
_ROCE_V2: Final = "RoCE v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One of a port's addresses.

    Args:
        index: In the port's table; UCX_IB_GID_INDEX.
        address: As the kernel writes it.
        kind: "IB/RoCE v1" or "RoCE v2".
        network_device: That it belongs to; empty on InfiniBand.
    """

    index: int
    address: str
    kind: str = ""
    network_device: str = ""

    @property
    def is_routable(self) -> bool:
        """Whether it stands for an IP address that is more than link-local."""
        return not ipaddress.IPv6Address(self.address).is_link_local


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of a device, in the kernel's words.

    Args:
        device: For example "mlx5_0".
        port: From 1.
        state: "ACTIVE", "INIT", "DOWN" and so on.
        physical: "LinkUp", "Polling", "Disabled" and so on.
        link_layer: "InfiniBand" or "Ethernet".
        rate: For people.
        gids: Those that are set.
    """

    device: str
    port: int
    state: str
    physical: str
    link_layer: str
    rate: str = ""
    gids: tuple[Gid, ...] = ()

    @property
    def network_device(self) -> str:
        """That goes with the port, as far as its addresses tell; empty: none."""
        return next((gid.network_device for gid in self.gids if gid.network_device), "")

    @property
    def roce_gid(self) -> Gid | None:
        """The RoCE v2 address to take: of IPv4, else any that can be routed, else the first."""
        found = [gid for gid in self.gids if gid.kind == _ROCE_V2]
        routable = [gid for gid in found if gid.is_routable]
        of_ipv4 = [gid for gid in routable if ipaddress.IPv6Address(gid.address).ipv4_mapped is not None]
        return next(iter([*of_ipv4, *routable, *found]), None)


def rdma_devices(root: Path) -> list[str]:
    """Names of all devices under a root directory, "/" of this machine."""
    return sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))


def read_ports(root: Path) -> Iterator[RdmaPort]:
    """Every port of every device under a root directory."""
    for device in rdma_devices(root):
        folder = root / "sys/class/infiniband" / device / "ports"
        for path in sorted(folder.glob("*"), key=lambda one: int(one.name) if one.name.isdigit() else 0):
            if path.name.isdigit():
                yield _read_port(device, path)


def _read_port(device: str, path: Path) -> RdmaPort:
    def value(name: str) -> str:
        return (read_line(path / name) or "?").rpartition(":")[2].strip()  # "4: ACTIVE"

    return RdmaPort(
        device=device,
        port=int(path.name),
        state=value("state"),
        physical=value("phys_state"),
        link_layer=value("link_layer"),
        rate=value("rate"),
        gids=tuple(_read_gids(path)),
    )


def _read_gids(port: Path) -> Iterator[Gid]:
    for path in sorted((port / "gids").glob("*"), key=lambda one: int(one.name) if one.name.isdigit() else 0):
        address = read_line(path)
        if not address or address == _NO_GID or not re.fullmatch(r"[0-9a-fA-F:]+", address):
            continue
        kind = read_line(port / "gid_attrs/types" / path.name) or ""
        device = read_line(port / "gid_attrs/ndevs" / path.name) or ""
        yield Gid(index=int(path.name), address=address, kind=kind, network_device=device)


def check_rdma(ports: Sequence[RdmaPort], *, has_verbs: bool) -> Iterator[Finding]:
    """Whether programs may use the devices at all, and each port.

    Args:
        ports: Of all devices.
        has_verbs: Whether there is a /dev/infiniband/uverbs device.
    """
    if not ports:
        yield ok("rdma", "no device; hosts would talk over TCP")
        return
    if has_verbs:
        yield ok("rdma", f"{len(ports)} port{'s' if len(ports) > 1 else ''}, /dev/infiniband/uverbs is there")
    else:
        text = "there are devices, and no /dev/infiniband/uverbs by which a program could use them"
        yield warn("rdma", text, "modprobe ib_uverbs (a container: docker run --device /dev/infiniband)")
    for port in ports:
        yield check_port(port)


def check_port(port: RdmaPort) -> Finding:
    """Whether a port has a link, and an address that others can reach it at."""
    name = f"rdma {port.device}:{port.port}"
    text = f"{port.state}, {port.physical}, {port.link_layer}, {port.rate}"
    is_ethernet = port.link_layer == "Ethernet"
    if port.state != "ACTIVE":
        return warn(name, text, _fix_link(port))
    if not is_ethernet:
        return ok(name, f"{text}, GID {port.gids[0].address}" if port.gids else text)
    gid = port.roce_gid
    if gid is None:
        text += "; no RoCE v2 GID, so that it cannot be routed, and many switches drop it"
        return warn(name, text, f"cma_roce_mode -d {port.device} -p {port.port} -m 2")
    text += f", RoCE v2 GID {gid.index} ({_address(gid)}{', ' + gid.network_device if gid.network_device else ''})"
    if not gid.is_routable:
        text += "; it is link-local only, which reaches no other network"
        return warn(name, text, f"ip address add ADDRESS/PREFIX dev {gid.network_device or 'DEVICE'}")
    return ok(name, f"{text}; UCX_IB_GID_INDEX={gid.index} if UCX takes another one")


def _fix_link(port: RdmaPort) -> str:
    if port.state == "INIT":
        return "start a subnet manager for the fabric: systemctl start opensm (on one host, or on the switch)"
    if port.link_layer == "Ethernet":
        return f"ip link set {port.network_device or 'DEVICE'} up (which device: rdma link show), and look at the cable"
    if port.physical == "Disabled":
        return f"ibportstate -C {port.device} -D 0 {port.port} enable"
    return f"look at the cable and at the switch's port: ibstat {port.device} {port.port}"


def _address(gid: Gid) -> str:
    address = ipaddress.IPv6Address(gid.address)
    return str(address.ipv4_mapped or address)


def check_gpu_direct(*, has_gpu: bool, has_rdma: bool, has_peermem: bool, driver: str, kernel: str) -> Finding | None:
    """Whether a network card can read and write a GPU's memory; None where there is no GPU or no RDMA.

    Args:
        has_gpu, has_rdma: What there is.
        has_peermem: Whether the module nvidia_peermem is loaded.
        driver: /proc/driver/nvidia/version.
        kernel: Release of the kernel.
    """
    if not (has_gpu and has_rdma):
        return None
    name = "gpu over rdma"
    if has_peermem:
        return ok(name, "nvidia_peermem is loaded")
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    is_new = numbers is not None and (int(numbers[1]), int(numbers[2])) >= _FIRST_DMABUF_KERNEL
    if is_new and "Open Kernel Module" in driver:
        return ok(name, f"dma-buf: kernel {kernel}, NVIDIA's open kernel module")
    text = "neither nvidia_peermem nor dma-buf (kernel 5.12 with NVIDIA's open kernel module): bytes take a way over host memory"
    return warn(name, text, "modprobe nvidia-peermem (or install nvidia-open)")
