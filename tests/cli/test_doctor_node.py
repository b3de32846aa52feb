"""`kvferry doctor --node`: what is said of a node that runs, and of one that does not."""

from __future__ import annotations

import socket
import time
from typing import Any

import grpc
import pytest

import transfer
from kvferry.doctor_node import NodeLook, check_node, look_at_node
from kvferry.finding import State
from node_runtime.health import HealthServer, Readiness
from transfer.errors import ConfigError
from transfer.messages import PROTOCOL_VERSION
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.server import serve


def status(**fields: Any) -> pb.NodeStatus:
    instance = pb.InstanceInfo(protocol_versions=[PROTOCOL_VERSION], transport="ucx")
    known: dict[str, Any] = {"role": "decode", "state": "ready", "ready": True, "version": "0.2.0", "instance": instance}
    return pb.NodeStatus(**known | {"time_s": 1.0, "http_port": 7180} | fields)


def found(look: NodeLook) -> dict[str, tuple[State, str, str]]:
    findings = check_node(look, transports=("ucx", "nixl"))
    return {one.name.removeprefix("node n:1").strip(): (one.state, one.text, one.mend) for one in findings}


def looked(*, offset_s: float = 0.0, http_error: str = "", **fields: Any) -> NodeLook:
    return NodeLook(address="n:1", status=status(**fields), round_trip_s=0.002, offset_s=offset_s, http_error=http_error)


def test_a_node_that_is_well() -> None:
    assert found(looked(offset_s=0.0123)) == {
        "": (State.OK, "decode node, ready, version 0.2.0, answers within 2.0 ms", ""),
        "clock": (State.OK, "+12.3 ms from this machine's, give or take 1.0 ms", ""),
        "protocol": (
            State.OK,
            f"version {PROTOCOL_VERSION} in common; kvferry 0.2.0 there, {transfer.__version__} here",
            "",
        ),
        "transport": (State.OK, "ucx, which this machine has, too", ""),
        "http": (State.OK, "port 7180 answers", ""),
    }


@pytest.mark.parametrize(
    ("look", "which", "state", "said", "mend"),
    [
        (
            looked(ready=False, not_ready_reason="it drains"),
            "",
            State.WARN,
            "not ready: it drains",
            "kvferry status --target n:1",
        ),
        (looked(offset_s=-0.6), "clock", State.WARN, "-600.0 ms", "timedatectl"),
        (looked(offset_s=0.5005), "clock", State.OK, "+500.5 ms", ""),
        (looked(time_s=0.0, offset_s=-1e9), "clock", State.OK, "does not tell its time", ""),
        (looked(instance=pb.InstanceInfo(protocol_versions=[98, 99])), "protocol", State.FAIL, "[98, 99] there", "version 99"),
        (looked(instance=pb.InstanceInfo()), "protocol", State.OK, "no ranks", ""),
        (looked(instance=pb.InstanceInfo()), "transport", State.OK, "no ranks", ""),
        (looked(instance=pb.InstanceInfo(transport="cuda_ipc")), "transport", State.WARN, "(ucx, nixl)", "kvferry[cuda-ipc]"),
        (looked(http_error="refused"), "http", State.WARN, "refused; its gRPC port answers", "7180"),
    ],
)
def test_what_is_not_well_comes_with_what_mends_it(look: NodeLook, which: str, state: State, said: str, mend: str) -> None:
    finding = found(look)[which]
    assert finding[0] is state and said in finding[1] and mend in finding[2]


def test_a_node_without_an_http_port_is_not_blamed_for_it() -> None:
    assert "http" not in found(looked(http_port=0))


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
    health = HealthServer(lambda: Readiness(is_ready=True), lambda: b"")
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


async def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        look = await look_at_node(f"127.0.0.1:{held.getsockname()[1]}", None, timeout_s=2.0)
    assert look.status is None and look.error and not look.is_refused
    with pytest.raises(ConfigError):
        await look_at_node("nonsense", None)
