"""RDMA, GPUs, clock and versions: each check tells right from wrong, on what a kernel writes, laid out in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.doctor.devices import Gid, PeerAccess, RdmaPort, check_gpu_direct, check_peers, check_port, rdma_devices, read_ports
from kvferry.doctor.finding import Finding, State
from kvferry.doctor.host import ClockState, check_clock, check_versions

LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0005"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def lay(root: Path, device: str, port: int, *, state: str, layer: str, physical: str = "5: LinkUp") -> Path:
    """A port as Linux shows one; returns its folder."""
    folder = root / "sys/class/infiniband" / device / "ports" / str(port)
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (folder / name).mkdir(parents=True)
    for name, text in (("state", state), ("phys_state", physical), ("link_layer", layer), ("rate", "200 Gb/sec (4X HDR)")):
        (folder / name).write_text(f"{text}\n")
    return folder


def lay_gid(port: Path, index: int, address: str, kind: str, device: str) -> None:
    (port / "gids" / str(index)).write_text(f"{address}\n")
    if address != EMPTY:  # of the others the kernel shows neither: reading them fails
        (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
        (port / "gid_attrs/ndevs" / str(index)).write_text(f"{device}\n")


def test_ports_and_their_addresses_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    lay(tmp_path, "mlx5_1", 1, state="4: ACTIVE", layer="InfiniBand")
    port = lay(tmp_path, "mlx5_0", 1, state="4: ACTIVE", layer="Ethernet")
    for index, (address, kind) in enumerate(
        [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2"), (EMPTY, "")]
    ):
        lay_gid(port, index, address, kind, "ens1f0")
    lay(tmp_path, "mlx5_0", 2, state="1: DOWN", layer="Ethernet", physical="3: Disabled")
    assert rdma_devices(tmp_path) == ["mlx5_0", "mlx5_1"]
    first, second, third = read_ports(tmp_path)
    assert (first.device, first.port, first.state, first.physical, first.link_layer) == (
        "mlx5_0",
        1,
        "ACTIVE",
        "LinkUp",
        "Ethernet",
    )
    assert [gid.index for gid in first.gids] == [0, 1, 2, 3], "those that are not set are no addresses"
    assert first.roce_gid == Gid(index=3, address=IPV4, kind="RoCE v2", network_device="ens1f0")
    assert (second.port, second.state, second.physical, second.gids) == (2, "DOWN", "Disabled", ())
    assert (third.device, third.link_layer) == ("mlx5_1", "InfiniBand")
    finding = check_port(first)
    assert finding.state is State.OK
    assert "RoCE v2 GID 3 (10.0.0.5, ens1f0)" in finding.text and "UCX_IB_GID_INDEX=3" in finding.text


def port(state: str = "ACTIVE", physical: str = "LinkUp", link_layer: str = "Ethernet", gids: tuple[Gid, ...] = ()) -> RdmaPort:
    return RdmaPort(
        device="mlx5_0", port=1, state=state, physical=physical, link_layer=link_layer, rate="200 Gb/sec (4X HDR)", gids=gids
    )


def gid(address: str, index: int = 3, kind: str = "RoCE v2") -> Gid:
    return Gid(index=index, address=address, kind=kind, network_device="ens1f0")


@pytest.mark.parametrize(
    ("found", "state", "said", "fix"),
    [
        (port(gids=(gid(IPV4),)), State.OK, "10.0.0.5", ""),
        (port(gids=(gid(LINK_LOCAL, 1),)), State.WARN, "link-local only", "ip address add ADDRESS/PREFIX dev ens1f0"),
        (port(gids=(gid(IPV4, 0, "IB/RoCE v1"),)), State.WARN, "no RoCE v2 GID", "cma_roce_mode -d mlx5_0 -p 1 -m 2"),
        (port(state="DOWN", physical="Disabled", gids=(gid(IPV4),)), State.WARN, "DOWN", "ip link set ens1f0 up"),
        (port(state="INIT", link_layer="InfiniBand"), State.WARN, "INIT", "opensm"),
    ],
)  # fmt: skip
def test_each_port_tells_what_it_lacks(found: RdmaPort, state: State, said: str, fix: str) -> None:
    finding = check_port(found)
    assert finding.state is state and finding.name == "rdma mlx5_0:1"
    assert said in finding.text and fix in finding.fix


@pytest.mark.parametrize(
    ("has_gpu", "has_rdma", "has_peermem", "driver", "kernel", "state"),
    [
        (False, True, False, "", "6.1.0", None),
        (True, True, True, "NVIDIA UNIX x86_64 Kernel Module", "5.4.0", State.OK),
        (True, True, False, "NVIDIA UNIX Open Kernel Module for x86_64", "5.15.0-91-generic", State.OK),
        (True, True, False, "NVIDIA UNIX x86_64 Kernel Module", "6.8.0", State.WARN),
    ],
)
def test_network_cards_reach_a_gpu_by_one_of_two_ways(
    has_gpu: bool, has_rdma: bool, has_peermem: bool, driver: str, kernel: str, state: State | None
) -> None:
    finding = check_gpu_direct(has_gpu=has_gpu, has_rdma=has_rdma, has_peermem=has_peermem, driver=driver, kernel=kernel)
    assert (finding.state if finding else None) is state


def peers(*rows: str) -> PeerAccess:
    return PeerAccess(names=("NVIDIA H200",) * len(rows), reach=tuple(tuple(one == "x" for one in row) for row in rows))


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        (peers("xx", "xx"), State.OK, "2 x NVIDIA H200: each reaches every other"),
        (peers("xx.", "xxx", ".xx"), State.WARN, "not 0-2, 2-0;"),
        ("torch did not answer within 60 s", State.WARN, "not known: torch did not answer"),
    ],
)
def test_gpus_that_do_not_reach_each_other_are_named(found: PeerAccess | str, state: State, said: str) -> None:
    finding = check_peers(found)
    assert finding.state is state and said in finding.text


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        (ClockState(is_synchronised=True, offset_s=0.000123, max_error_s=0.02), State.OK, "+0.123 ms, at most 20 ms wrong"),
        (ClockState(is_synchronised=True, offset_s=-0.2, max_error_s=0.2), State.WARN, "moved by -200.000 ms"),
        (ClockState(is_synchronised=False, offset_s=0.0, max_error_s=16.0), State.WARN, "unsynchronised"),
    ],
)
def test_a_clock_that_nobody_keeps_is_said(found: ClockState | str, state: State, said: str) -> None:
    finding = check_clock(found)
    assert finding.state is state and said in finding.text


REQUIRED = {"torch": "2.11", "grpcio": "1.66.2"}
TESTED = {"torch": "2.13.0", "grpcio": "1.85.1", "rich": "15.0.0"}


def versions(tested: dict[str, str] = TESTED, **here: str) -> Finding:
    return check_versions(here.get, REQUIRED, tested)


@pytest.mark.parametrize(
    ("finding", "state", "said", "fix"),
    [
        (versions(torch="2.13.0+cpu", grpcio="1.85.1", rich="15.0.0"), State.OK, "3 packages, all as tested", ""),
        (versions(torch="2.9.1", grpcio="1.85.1"), State.FAIL, "torch 2.9.1 is older than 2.11", "--upgrade torch"),
        (versions(torch="2.14.0", rich="14.0.0"), State.WARN, "rich 14.0.0 (tested: 15.0.0), torch 2.14.0 (tested", "rich torch"),
    ],
)
def test_versions_are_compared_with_what_is_asked_for_and_what_was_tested(
    finding: Finding, state: State, said: str, fix: str
) -> None:
    assert finding.state is state
    assert said in finding.text and fix in finding.fix
