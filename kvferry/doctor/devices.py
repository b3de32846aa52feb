"""Checks of devices: GPUs and their access to each other, RDMA ports, and RDMA to GPU memory."""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvferry.doctor.finding import Finding, ok, read_line, warn

_CHILD_S: Final = 60.0  # torch and its first look at the devices take seconds, many where the machine is busy
_SHOWN_PAIRS: Final = 6
_SCRIPT: Final = """
import json, torch
count = torch.cuda.device_count()
reach = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
print(json.dumps({"names": [torch.cuda.get_device_name(one) for one in range(count)], "reach": reach}))
"""
_FIRST_DMABUF_KERNEL: Final = (5, 12)
"""The first Linux that exports a GPU's memory to a network card as a dma-buf."""
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"
_ROCE_V2: Final = "RoCE v2"


def check_gpu(has_gpu: bool, torch_version: str | None) -> Finding:
    if not has_gpu:
        return ok("gpu", "none; everything runs on the CPU")
    if torch_version is not None and torch_version.endswith("+cpu"):
        text = f"there is one, but torch {torch_version} cannot use it"
        return warn("gpu", text, "install torch's CUDA build: make clean setup")
    return ok("gpu", f"yes, torch {torch_version or 'MISSING'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """GPUs in torch's order; `reach[a][b]` means that a can read and write b's memory."""

    names: tuple[str, ...]
    reach: tuple[tuple[bool, ...], ...]


def look_at_peers() -> PeerAccess | str:
    """Ask torch in another process, because CUDA stays loaded in a process that asked. Return the reason if it fails."""
    try:
        run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=_CHILD_S)
    except subprocess.TimeoutExpired:
        return f"torch did not answer within {_CHILD_S:g} s"
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines()
        return lines[-1] if lines else f"torch ended with {run.returncode}"
    return parse_peers(run.stdout)


def parse_peers(text: str) -> PeerAccess | str:
    """Parse the last line of the other process's output; libraries may have written the lines before."""
    try:
        content = json.loads(text.strip().splitlines()[-1])
        return PeerAccess(names=tuple(content["names"]), reach=tuple(tuple(map(bool, row)) for row in content["reach"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return f"torch's answer is not understood: {text[:200]!r}"


def check_peers(found: PeerAccess | str) -> Finding:
    name = "gpu peer access"
    if isinstance(found, str):
        return warn(name, f"not known: {found}", "nvidia-smi topo -p2p r, and see the line about the gpu")
    count = len(found.names)
    if count == 0:
        fix = "unset CUDA_VISIBLE_DEVICES; nvidia-smi tells whether it works"
        return warn(name, "torch sees no GPU, although the machine has one", fix)
    what = ", ".join(f"{found.names.count(name)} x {name}" for name in dict.fromkeys(found.names))
    if count == 1:
        return ok(name, f"{what}: none to reach")
    missing = [f"{a}-{b}" for a in range(count) for b in range(count) if not found.reach[a][b]]
    if not missing:
        return ok(name, f"{what}: each reaches every other")
    more = f" and {len(missing) - _SHOWN_PAIRS} more" if len(missing) > _SHOWN_PAIRS else ""
    pairs = f"{', '.join(missing[:_SHOWN_PAIRS])}{more}"
    fix = "nvidia-smi topo -p2p r tells why; without NVLink: iommu=pt and ACS off (setpci), in a VM its PCI topology"
    return warn(name, f"{what}: not {pairs}; these pairs cannot use cuda_ipc, and ucx copies over the host", fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """An address of a port.

    Args:
        index: Index in the port's table, as in UCX_IB_GID_INDEX.
        kind: "IB/RoCE v1" or "RoCE v2".
        network_device: Empty on InfiniBand.
    """

    index: int
    address: str
    kind: str = ""
    network_device: str = ""

    @property
    def is_routable(self) -> bool:
        """Return True unless the address is link-local."""
        return not ipaddress.IPv6Address(self.address).is_link_local


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port of a device, in the kernel's words.

    Args:
        port: Number, from 1.
        state: "ACTIVE", "INIT", "DOWN" and so on.
        physical: "LinkUp", "Polling", "Disabled" and so on.
        link_layer: "InfiniBand" or "Ethernet".
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
        """Return the network device of the port's addresses; empty means none."""
        return next((gid.network_device for gid in self.gids if gid.network_device), "")

    @property
    def roce_gid(self) -> Gid | None:
        """Return the best RoCE v2 address: IPv4, or else routable, or else the first."""
        found = [gid for gid in self.gids if gid.kind == _ROCE_V2]
        routable = [gid for gid in found if gid.is_routable]
        of_ipv4 = [gid for gid in routable if ipaddress.IPv6Address(gid.address).ipv4_mapped is not None]
        return next(iter([*of_ipv4, *routable, *found]), None)


def rdma_devices(root: Path) -> list[str]:
    """Return the names of the RDMA devices under a root directory."""
    return sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))


def read_ports(root: Path) -> Iterator[RdmaPort]:
    """Yield every port of every RDMA device under a root directory."""
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
    """Check that programs can use the devices (`has_verbs`: /dev/infiniband/uverbs exists), and check each port."""
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
    """Check that a port has a link, and an address that other hosts can reach."""
    name = f"rdma {port.device}:{port.port}"
    text = f"{port.state}, {port.physical}, {port.link_layer}, {port.rate}"
    if port.state != "ACTIVE":
        return warn(name, text, _fix_link(port))
    if port.link_layer != "Ethernet":
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
    """Check that a network card can read and write a GPU's memory; None if there is no GPU or no RDMA.

    Args:
        has_peermem: The module nvidia_peermem is loaded.
        driver: Content of /proc/driver/nvidia/version.
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
