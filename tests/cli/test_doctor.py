"""`kvferry doctor`: each check tells right from wrong, and this machine, on which the tests run, is well."""

from __future__ import annotations

import importlib
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from kvferry.__main__ import app
from kvferry.doctor import command as doctor
from kvferry.doctor import host
from kvferry.doctor.devices import (
    Gid,
    PeerAccess,
    RdmaPort,
    check_gpu,
    check_gpu_direct,
    check_peers,
    check_port,
    rdma_devices,
    read_ports,
)
from kvferry.doctor.finding import Finding, State
from kvferry.doctor.host import ClockState
from kvferry.doctor.loopback import LoopbackResult
from kvferry.doctor.node import NodeLook, check_configured_ports, check_node, look_at_node, server_of
from node_runtime import exit_codes
from node_runtime.health import HealthServer, Readiness
from transfer.config import ServerConfig
from transfer.errors import ConfigError, EngineError
from transfer.messages import PROTOCOL_VERSION
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.server import serve

LINK_LOCAL = "fe80:0000:0000:0000:0a00:27ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0005"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
REQUIRED = {"torch": "2.11", "grpcio": "1.66.2"}
TESTED = {"torch": "2.13.0", "grpcio": "1.85.1", "rich": "15.0.0"}
UCX = ["self/memory", "tcp/eth0"]


def versions(**here: str) -> Finding:
    return host.check_versions(here.get, REQUIRED, TESTED)


def peers(*rows: str) -> Finding:
    return check_peers(
        PeerAccess(names=("NVIDIA H200",) * len(rows), reach=tuple(tuple(one == "x" for one in row) for row in rows))
    )


def clock(*, is_synchronised: bool = True, offset_s: float = 0.0, max_error_s: float = 0.02) -> Finding:
    return host.check_clock(ClockState(is_synchronised=is_synchronised, offset_s=offset_s, max_error_s=max_error_s))


def gid(address: str, index: int = 3, kind: str = "RoCE v2") -> Gid:
    return Gid(index=index, address=address, kind=kind, network_device="ens1f0")


def port(*gids: Gid, state: str = "ACTIVE", physical: str = "LinkUp", link_layer: str = "Ethernet") -> Finding:
    found = RdmaPort(device="mlx5_0", port=1, state=state, physical=physical, link_layer=link_layer, gids=gids)
    return check_port(found)


def direct(*, has_peermem: bool = False, driver: str = "", kernel: str) -> Finding:
    found = check_gpu_direct(has_gpu=True, has_rdma=True, has_peermem=has_peermem, driver=driver, kernel=kernel)
    assert found is not None
    return found


def measured(bytes_per_s: float) -> Callable[[str], LoopbackResult]:
    return lambda transport: LoopbackResult(lane=f"{transport}/net", latency_s=1e-4, bandwidth_bytes_per_s=bytes_per_s)


def failing(transport: str) -> LoopbackResult:
    raise EngineError("no way to the peer")


OPEN_DRIVER, CLOSED_DRIVER = "NVIDIA UNIX Open Kernel Module for x86_64", "NVIDIA UNIX x86_64 Kernel Module"


@pytest.mark.parametrize(
    ("finding", "state", "said", "fix"),
    [
        (host.check_python((3, 11, 0)), State.OK, "3.11.0", ""),
        (host.check_python((3, 10, 12)), State.FAIL, "3.10.12", "python3.11"),
        (host.check_packages(lambda name: "1"), State.OK, "torch 1", ""),
        (host.check_packages(lambda name: None if name == "triton" else "1"), State.FAIL, "triton MISSING", "triton"),
        (versions(torch="2.13.0+cpu", grpcio="1.85.1", rich="15.0.0"), State.OK, "3 packages, all as tested", ""),
        (versions(torch="2.9.1", grpcio="1.85.1"), State.FAIL, "torch 2.9.1 is older than 2.11", "--upgrade torch"),
        (versions(torch="2.14.0", rich="14.0.0"), State.WARN, "rich 14.0.0 (tested: 15.0.0), torch 2.14.0", "rich torch"),
        (host.check_compiled_copies(True), State.OK, "compiled code", ""),
        (host.check_compiled_copies(False), State.WARN, "NumPy, which is slower", "gcc"),
        (host.check_ucx("UCX 1", UCX, []), State.OK, "no RDMA device", ""),
        (host.check_ucx("UCX 1", UCX, ["mlx5_0"]), State.WARN, "none of the RDMA devices mlx5_0", "transport.name: nixl"),
        (host.check_ucx("UCX 1", ["self/memory", "rc_mlx5/mlx5_0:1"], ["mlx5_0"]), State.OK, "rc_mlx5", ""),
        (host.check_ucx("UCX 1", ["cma/memory"], []), State.FAIL, "cma/memory", "unset UCX_TLS"),
        (host.check_shared_memory(1 << 30, 1 << 30), State.OK, "1,024 MiB", ""),
        (host.check_shared_memory(64 << 20, 64 << 20), State.WARN, "64 MiB", "--shm-size=2g"),
        (host.check_ptrace_scope(None), State.OK, "no yama", ""),
        (host.check_ptrace_scope("1"), State.WARN, "ptrace_scope is 1", "ptrace_scope=0"),
        (host.check_memlock(8 << 20, has_rdma=True), State.WARN, "8 MiB", "ulimit -l"),
        (host.check_memlock(resource.RLIM_INFINITY, has_rdma=True), State.OK, "unlimited", ""),
        (host.check_open_files(23807), State.WARN, "23,807, with which a decode rank takes 1023", "ulimit -n 23808"),
        (clock(offset_s=0.000123), State.OK, "+0.123 ms, at most 20 ms wrong", ""),
        (clock(offset_s=-0.2, max_error_s=0.2), State.WARN, "moved by -200.000 ms", "wait"),
        (clock(is_synchronised=False, max_error_s=16.0), State.WARN, "unsynchronised", "set-ntp"),
        (check_gpu(True, "2.13.0+cpu"), State.WARN, "torch 2.13.0+cpu cannot use it", "CUDA build"),
        (check_gpu(True, "2.13.0+cu130"), State.OK, "2.13.0+cu130", ""),
        (peers("xx", "xx"), State.OK, "2 x NVIDIA H200: each reaches every other", ""),
        (peers("xx.", "xxx", ".xx"), State.WARN, "not 0-2, 2-0;", "topo -p2p"),
        (check_peers("torch did not answer within 60 s"), State.WARN, "not known: torch did not answer", "topo -p2p"),
        (port(gid(IPV4)), State.OK, "10.0.0.5", ""),
        (port(gid(LINK_LOCAL, 1)), State.WARN, "link-local only", "ip address add ADDRESS/PREFIX dev ens1f0"),
        (port(gid(IPV4, 0, "IB/RoCE v1")), State.WARN, "no RoCE v2 GID", "cma_roce_mode -d mlx5_0 -p 1 -m 2"),
        (port(gid(IPV4), state="DOWN", physical="Disabled"), State.WARN, "DOWN", "ip link set ens1f0 up"),
        (port(state="INIT", link_layer="InfiniBand"), State.WARN, "INIT", "opensm"),
        (direct(has_peermem=True, driver=CLOSED_DRIVER, kernel="5.4.0"), State.OK, "nvidia_peermem", ""),
        (direct(driver=OPEN_DRIVER, kernel="5.15.0-91-generic"), State.OK, "dma-buf", ""),
        (direct(driver=CLOSED_DRIVER, kernel="6.8.0"), State.WARN, "neither", "modprobe nvidia-peermem"),
        (doctor.check_transfer("ucx", measured(4e9)), State.OK, "4.00 GB/s", ""),
        (doctor.check_transfer("ucx", measured(1e8)), State.WARN, "0.10 GB/s", "idle machine"),
        (doctor.check_transfer("ucx", failing), State.FAIL, "no way to the peer", "UCX_LOG_LEVEL=info"),
    ],
)
def test_each_check_tells_right_from_wrong(finding: Finding, state: State, said: str, fix: str) -> None:
    assert finding.state is state and bool(finding.fix) == (state is not State.OK)
    assert said in finding.text and fix in finding.fix


def test_without_rdma_nothing_is_said_about_gpus_over_rdma() -> None:
    assert check_gpu_direct(has_gpu=False, has_rdma=True, has_peermem=False, driver="", kernel="6.1.0") is None


def test_ports_can_be_had_here() -> None:
    found = host.check_ports()
    assert found.state is State.OK and "--node-config" in found.text, "it says what it has not looked at"
    assert os.environ.get("UCX_TLS") is None


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
    folder = lay(tmp_path, "mlx5_0", 1, state="4: ACTIVE", layer="Ethernet")
    for index, (address, kind) in enumerate(
        [(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2"), (EMPTY, "")]
    ):
        lay_gid(folder, index, address, kind, "ens1f0")
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


# Nodes


def status(**fields: Any) -> pb.NodeStatus:
    instance = pb.InstanceInfo(protocol_versions=[PROTOCOL_VERSION], transport="ucx")
    known: dict[str, Any] = {"role": "decode", "state": "ready", "ready": True, "version": "0.2.0", "instance": instance}
    return pb.NodeStatus(**known | {"time_s": 1.0, "http_port": 7180} | fields)


def found(look: NodeLook) -> dict[str, tuple[State, str, str]]:
    findings = check_node(look, transports=("ucx", "nixl"))
    return {one.name.removeprefix("node n:1").strip(): (one.state, one.text, one.fix) for one in findings}


def looked(*, offset_s: float = 0.0, http_error: str = "", **fields: Any) -> NodeLook:
    return NodeLook(address="n:1", status=status(**fields), round_trip_s=0.002, offset_s=offset_s, http_error=http_error)


@pytest.mark.parametrize(
    ("look", "which", "state", "said", "fix"),
    [
        (
            looked(ready=False, not_ready_reason="it drains"),
            "",
            State.WARN,
            "not ready: it drains",
            "kvferry status --target n:1",
        ),
        (looked(offset_s=-0.6), "clock", State.WARN, "-600.0 ms", "timedatectl"),
        (looked(instance=pb.InstanceInfo(protocol_versions=[98, 99])), "protocol", State.FAIL, "[98, 99] there", "version 99"),
        (
            looked(instance=pb.InstanceInfo(transport="cuda_ipc")),
            "transport",
            State.WARN,
            "has ucx, nixl",
            "kvferry[cuda-ipc]",
        ),
    ],
)
def test_each_problem_of_a_node_has_a_fix(look: NodeLook, which: str, state: State, said: str, fix: str) -> None:
    finding = found(look)[which]
    assert finding[0] is state and said in finding[1] and fix in finding[2]


def test_a_node_that_does_not_answer_fails_and_one_that_refuses_wants_a_certificate() -> None:
    assert found(NodeLook(address="n:1", error="refused"))[""][0] is State.FAIL
    assert "tls.client_names" in found(NodeLook(address="n:1", error="no", is_refused=True))[""][2]


class Node(pb_grpc.NodeControlServicer):
    """Its clock is ahead by `ahead_s`."""

    def __init__(self, http_port: int, ahead_s: float) -> None:
        self.http_port = http_port
        self.ahead_s = ahead_s

    async def Status(self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.NodeStatus:
        return status(time_s=time.time() + self.ahead_s, http_port=self.http_port)


async def test_a_real_server_is_looked_at() -> None:
    health = HealthServer(lambda: Readiness(is_ready=True), lambda: ())
    port = await health.start("127.0.0.1", 0)
    server = await serve("127.0.0.1", 0, node_control=Node(port, 10.0))
    try:
        look = await look_at_node(server.address, None)
        assert look.status is not None and look.http_error == ""
        assert abs(look.offset_s - 10.0) <= look.round_trip_s / 2 + 0.001
        await health.stop()
        assert "Connection refused" in (await look_at_node(server.address, None)).http_error
    finally:
        await server.close(grace_s=0)
        await health.stop()


def states(server: ServerConfig) -> dict[str, State]:
    return {one.name: one.state for one in check_configured_ports(server)}


def test_a_port_that_is_taken_is_told_and_one_that_is_free_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        grpc, http = check_configured_ports(ServerConfig(port=port))
        assert (grpc.state, http.state) == (State.WARN, State.OK)
        assert f"127.0.0.1 port {port} (gRPC) is taken" in grpc.text and f"sport = :{port}" in grpc.fix
        assert "a free port" in http.text and "others reach it" in http.text
    assert states(ServerConfig(port=port)) == {"server.port": State.OK, "server.http_port": State.OK}, "it is let go again"


def test_a_configuration_of_either_tier_is_read(tmp_path: Path) -> None:
    for section in ("chunk:\n  chunk_tokens: 64\n", "peers:\n  prefill_nodes: ['h:1']\n"):
        file = tmp_path / "node.yaml"
        file.write_text(f"model: /m\nserver:\n  port: 7100\n{section}")
        assert server_of(file, {}).port == 7100
        assert server_of(file, {"KVFERRY_SERVER__PORT": "7200"}).port == 7200, "as the node reads it"
    file.write_text("model: /m\nserver:\n  prot: 7100\n")
    with pytest.raises(ConfigError, match=r"did you mean server\.port"):
        server_of(file, {})


def test_the_command_looks_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: iter(()))
    file = tmp_path / "node.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file.write_text(f"model: /m\nserver:\n  port: {taken.getsockname()[1]}\n")
        found = CliRunner().invoke(app, ["doctor", "--node-config", str(file)])
    assert found.exit_code == 0 and "warn server.port" in found.output and "ok   server.http_port" in found.output
    missing = CliRunner().invoke(app, ["doctor", "--node-config", str(tmp_path / "none.yaml")])
    assert missing.exit_code == exit_codes.BAD_INPUT and "none.yaml cannot be read" in missing.output


def test_a_machine_without_ucx_can_transfer_within_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    found = host.ucx_devices([])
    assert found.state is State.WARN and "nodes of other machines need it" in found.text
    assert doctor.transports_here(lambda name: None, has_gpu=True) == ("shm",)
