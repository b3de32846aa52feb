"""`kvferry doctor --node`: what is said of a node that runs, and of one that does not."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from kvferry.doctor.finding import State
from kvferry.doctor.node import NodeLook, check_node, look_at_node
from node_runtime.health import HealthServer, Readiness
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
        (looked(instance=pb.InstanceInfo(transport="cuda_ipc")), "transport", State.WARN, "(ucx, nixl)", "kvferry[cuda-ipc]"),
    ],
)
def test_what_is_not_well_comes_with_its_fix(look: NodeLook, which: str, state: State, said: str, fix: str) -> None:
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
