"""The client and `kvferry generate` against a decode node with prepared answers: streams, errors, cancelling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.__main__ import app
from kvferry.cli.generate import GenerateOptions, run_generate
from kvferry.cli.node_client import NodeClient
from kvferry.cli.signals import run_until_signalled
from kvferry.cli.status_view import run_status
from node_runtime import exit_codes
from node_runtime.health import HealthServer, Readiness
from tests.authority import Authority
from tests.runtime.hand_clock import HandClock
from transfer.errors import ConfigError, PeerUnreachable, TransportTimeout
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.certificates import CertificateFiles
from transfer.registry.plain_values import plain
from transfer.registry.security import MutualTls
from transfer.registry.server import serve

STATUS = pb.NodeStatus(
    role="decode",
    state="ready",
    uptime_s=3.5,
    instance=pb.InstanceInfo(
        incarnation=255,
        shard=pb.ShardInfo(tp_size=2, page_size=32, order="NHD"),
        protocol_versions=[1],
        capabilities=["layer_groups", "resend_once"],
    ),
    ranks=[pb.RankStatus(rank=0, pid=7, pool_pages=10, ring_capacity=1 << 20, ring_live_bytes=1 << 19, requests=0)],
    peers=[pb.PeerStatus(address="h:1", state="lost", reason="[bold]it died[/bold]")],
    links=[pb.LinkStatus(prefill_rank=1, decode_rank=0, lane="ucx/shm", latency_s=1e-4, bandwidth_bytes_per_s=2**31)],
)


@dataclass(eq=False)
class FakeDecode(pb_grpc.DecodeControlServicer):
    """Sends `events`, then fails with `code`, hangs, or ends."""

    events: list[pb.GenerateEvent] = field(default_factory=list)
    code: grpc.StatusCode | None = None
    is_hanging: bool = False
    is_frozen: bool = False
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    remaining_s: float | None = None  # until the deadline of the last request

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.requests.append(request)
        self.remaining_s = context.time_remaining()
        try:
            for event in self.events:
                yield event
            if self.code is not None:
                await context.abort(self.code, "the reason, in one line")
            if self.is_hanging:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC was sending an event when the call was cancelled
            self.cancelled.set()
            raise

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        if self.is_frozen:
            await asyncio.sleep(60)
        return STATUS


class FakePrefill(pb_grpc.PrefillControlServicer):
    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        return pb.NodeStatus(role="prefill", state="draining")


@contextlib.asynccontextmanager
async def serving(node: FakeDecode | FakePrefill) -> AsyncIterator[str]:
    name = "decode_control" if isinstance(node, FakeDecode) else "prefill_control"
    server = await serve("127.0.0.1", 0, **{name: node})  # type: ignore[arg-type]
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.close(grace_s=0)


REQUEST = GenerateOptions(prompt="hi", max_new_tokens=5).request()
ACCEPTED = pb.GenerateEvent(accepted=pb.GenerateAccepted(request_id="r1", prompt_tokens=2))
TOKENS = [pb.GenerateEvent(tokens=pb.GeneratedTokens(token_ids=[n], text=text)) for n, text in ((5, " a"), (6, ""), (7, " b"))]
DONE = pb.GenerateEvent(
    done=pb.GenerateDone(finish_reason="length", prompt_tokens=2, generated_tokens=3, stats=pb.TransferStats(bytes=9), ttft_s=0.5)
)


async def test_text_streams_and_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    node = FakeDecode(events=[ACCEPTED, *TOKENS, DONE])
    async with serving(node) as address:
        assert await run_generate(address, REQUEST, timeout_s=None, is_json=False) == 0
    assert capsys.readouterr().out == " a b\n"
    assert node.requests == [REQUEST]


async def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeDecode(events=[ACCEPTED, *TOKENS, DONE])) as address:
        assert await run_generate(address, REQUEST, timeout_s=None, is_json=True) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["text"], content["token_ids"], content["request_id"]) == (" a b", [5, 6, 7], "r1")
    assert (content["finish_reason"], content["bytes_moved"], content["ttft_seconds"]) == ("length", 9, 0.5)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, exit_codes.BAD_INPUT),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, exit_codes.NO_ROOM),
        (grpc.StatusCode.UNAVAILABLE, exit_codes.UNAVAILABLE),
        (grpc.StatusCode.ABORTED, exit_codes.ABORTED),
        (grpc.StatusCode.DEADLINE_EXCEEDED, exit_codes.TOO_LATE),
        (grpc.StatusCode.DATA_LOSS, exit_codes.DATA_LOSS),
        (grpc.StatusCode.FAILED_PRECONDITION, exit_codes.DOES_NOT_FIT),
        (grpc.StatusCode.INTERNAL, exit_codes.ENGINE_FAILED),
    ],
)
@pytest.mark.parametrize("events", [[], [ACCEPTED, *TOKENS]])
async def test_each_status_has_its_exit_code_and_one_line(
    code: grpc.StatusCode, exit_code: int, events: list[pb.GenerateEvent], capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(FakeDecode(events=events, code=code)) as address:
        assert await run_generate(address, REQUEST, timeout_s=None, is_json=False) == exit_code
        printed = capsys.readouterr()
        which = " (request r1)" if events else ""  # as the node's log names it
        assert printed.err == f"kvferry generate: {address}: the reason, in one line{which}\n"
        assert printed.out == (" a b\n" if events else "")  # what came stays readable, the error is not glued to it


async def test_a_stream_without_a_last_event_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeDecode(events=[ACCEPTED, *TOKENS])) as address:
        assert await run_generate(address, REQUEST, timeout_s=None, is_json=False) == exit_codes.FAILED
    assert "without its last event" in capsys.readouterr().err


async def test_a_node_that_accepts_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeDecode(is_hanging=True)
    async with serving(node) as address, NodeClient(address) as client:
        first = asyncio.ensure_future(anext(client.generate(REQUEST, accept_timeout_s=1000)))
        while not node.requests:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patch:
            await HandClock(patch).advance(1000)
        with pytest.raises(TransportTimeout, match=r"no answer within 1000 s"):
            await asyncio.wait_for(first, 60)
        await asyncio.wait_for(node.cancelled.wait(), 60)


@pytest.mark.parametrize(
    ("events", "said"), [([], "no answer within 1000 s"), ([ACCEPTED], "not finished within 1000 s (request r1)")]
)
async def test_the_node_knows_the_deadline_and_its_end_is_reported(
    events: list[pb.GenerateEvent], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node ends the request here. At both ends, gRPC reports a deadline with the same code."""
    node = FakeDecode(events=events, code=grpc.StatusCode.DEADLINE_EXCEEDED)
    async with serving(node) as address:
        assert await run_generate(address, REQUEST, timeout_s=1000, is_json=False) == exit_codes.TOO_LATE
    assert capsys.readouterr().err == f"kvferry generate: {address}: {said}\n"
    assert node.remaining_s is not None and 0 < node.remaining_s < 1100  # gRPC sends tens of seconds, rounded up


async def test_cancelling_the_command_cancels_the_request() -> None:
    node = FakeDecode(events=[ACCEPTED, *TOKENS], is_hanging=True)
    async with serving(node) as address:
        running = asyncio.create_task(run_generate(address, REQUEST, timeout_s=None, is_json=False))
        while not node.requests:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.wait_for(node.cancelled.wait(), 60)


def test_signals_cancel_and_become_exit_codes() -> None:
    import os
    import signal

    cleaned: list[int] = []

    async def command(number: int) -> int:
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), number)
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.append(number)
        return 0

    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
    for number, code in expected.items():
        assert run_until_signalled(command(number)) == code
    assert cleaned == list(expected)


async def test_generating_at_a_prefill_node_says_so() -> None:
    async with serving(FakePrefill()) as address, NodeClient(address) as client:
        with pytest.raises(ConfigError, match=r"is a prefill node; give the address of a decode node"):
            await anext(client.generate(REQUEST))


@pytest.mark.parametrize("command", [("drain",), ("switch-role", "decode")])
@pytest.mark.parametrize("timeout", ["0", "nan", "86401"])
def test_a_timeout_that_is_no_time_is_refused(command: tuple[str, ...], timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """0 seconds would mean to a node that changes its role: as long as its own settings allow."""
    with pytest.raises(SystemExit) as ended:
        app(["node", *command, "--insecure", "--target", "127.0.0.1:1", f"--timeout={timeout}"])
    said = capsys.readouterr().err
    assert ended.value.code == exit_codes.BAD_INPUT
    *warnings, line = said.splitlines()
    assert line == f"kvferry node {command[0]}: --timeout is {timeout}; it must be above 0 and at most 86400 seconds"
    assert all(": warning: " in warning for warning in warnings)


async def test_status_of_either_role(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakePrefill()) as address, NodeClient(address) as client:
        assert (await client.status()).role == "prefill"
    async with serving(FakeDecode()) as address:
        async with NodeClient(address) as client:
            assert await client.status() == STATUS
        await run_status(address, is_json=True, is_watching=False)
        assert json.loads(capsys.readouterr().out) == plain(STATUS)
        await run_status(address, is_json=False, is_watching=False)
        shown = capsys.readouterr().out
    for text in ("ready", "0x00000000000000ff", "512.0 KiB", "1.0 MiB", "h:1 #1", "ucx/shm", "2.15 GB/s", "[bold]it died[/bold]"):
        assert text in shown
    assert "capabilities: layer_groups, resend_once" in shown


async def test_plain_text_to_a_port_of_TLS_says_what_to_do(tmp_path: Path) -> None:
    files = Authority().files(tmp_path, "node.example")
    tls = MutualTls(files=CertificateFiles(files.tls(), is_server=True), peer_names=())
    server = await serve("127.0.0.1", 0, decode_control=FakeDecode(), security=tls)
    try:
        async with NodeClient(f"127.0.0.1:{server.port}") as client:
            with pytest.raises(PeerUnreachable, match=r"do not speak TLS; give a certificate \(.*instead of --insecure"):
                await client.status()
    finally:
        await server.close(grace_s=0)


async def test_the_http_port_of_a_node_is_named() -> None:
    server = HealthServer(lambda: Readiness(is_ready=True), list)
    port = await server.start("127.0.0.1", 0)
    try:
        async with NodeClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(ConfigError, match=r"speaks HTTP/1, not gRPC; give the node's gRPC port \(server.port\)"):
                await client.status()
    finally:
        await server.stop()


async def test_a_port_on_which_nothing_listens_is_named() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        async with NodeClient(f"127.0.0.1:{held.getsockname()[1]}") as client:
            with pytest.raises(PeerUnreachable, match=r":\d+: nothing listens on this port \(Connection refused\)$"):
                await client.status()


async def test_a_status_that_does_not_come_is_a_timeout_in_words() -> None:
    async with serving(FakeDecode(is_frozen=True)) as address, NodeClient(address) as client:
        with pytest.raises(TransportTimeout, match=r"^127.0.0.1:\d+: no answer within 0.2 s$"):
            await client.status(timeout_s=0.2)
