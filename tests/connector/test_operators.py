"""Operators' calls to an engine that loads kvferry: the same as to a daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import pytest

from kvferry.cli.node_client import NodeClient
from kvferry.engines.connector import DECODE, PREFILL
from node_runtime.loop_thread import LoopThread
from tests.cluster.links.etcd_server import etcd_server
from tests.connector.conftest import Pair, Start
from tests.connector.instances import PROMPT, TIMEOUT_S, TO, Instance, hand_over, wait_for
from tests.tracing.collector import Collector, listening
from transfer.errors import ConfigError, TransferError
from transfer.logs import log_level, set_log_level
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[2]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on the loop of the instances, because gRPC's objects of a process should stay on one loop."""
    thread = LoopThread.shared()
    try:
        return thread.start(work).result(TIMEOUT_S)
    finally:
        thread.release()


def ask(instance: Instance, question: Callable[[NodeClient], Coroutine[Any, Any, _T]]) -> _T:
    async def asked() -> _T:
        async with NodeClient(instance.leader.address) as client:
            return await question(client)

    return run(asked())


def status_of(instance: Instance) -> pb.NodeStatus:
    return ask(instance, NodeClient.status)


def requests_of(instance: Instance) -> list[pb.RequestStatus]:
    return list(ask(instance, NodeClient.list_requests).requests)


def read(instance: Instance, path: str) -> str:
    with urlopen(f"http://{instance.leader.http_address}{path}", timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def kvferry(*arguments: str) -> Any:
    """Return the command's output, parsed as JSON."""
    command = [sys.executable, "-m", "kvferry", *arguments, "--insecure", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_prompt_is_listed_on_both_sides_and_aborted(pair: Pair) -> None:
    source, decode = pair({"tp_size": 2})
    source.computes("a", "t", end=32)
    decode.leader.want("b", "t", source.leader.address, PROMPT)
    decode.wait_until_ready("b")
    decode.leader.bind("b", [TO])
    wait_for(lambda: requests_of(decode)[0].stage == "receiving", "it is received")
    [sent], [received] = requests_of(source), requests_of(decode)
    assert (sent.role, sent.stage, sent.request_id, sent.prompt_tokens) == ("prefill", "computing", "t", len(PROMPT))
    assert (received.role, received.request_id, received.peer) == ("decode", "t", source.leader.address)
    assert sent.transfer_id == received.transfer_id
    assert not ask(decode, lambda client: client.abort("another"))
    assert ask(decode, lambda client: client.abort("t", reason="too slow"))
    assert "too slow" in decode.settled("b").failure
    source.finish("a")
    assert source.freed("a").failure
    source.assert_idle()
    assert requests_of(source) == requests_of(decode) == []


def test_a_prompt_that_nobody_asks_for_is_listed_and_aborted(start: Start) -> None:
    source = start(PREFILL)
    source.sends("a", "t")
    [kept] = requests_of(source)
    assert (kept.request_id, kept.transfer_id, kept.stage, kept.ready_tokens) == ("t", "t", "queued", len(PROMPT))
    assert ask(source, lambda client: client.abort("t", reason="nobody wants it"))
    assert source.freed("a").failure == "nobody wants it"


def test_a_prompt_whose_prefill_side_is_away_is_listed_and_aborted(start: Start) -> None:
    decode = start(DECODE, settings={"join_on_request": True})
    decode.leader.want("b", "t", "127.0.0.1:1", PROMPT)
    wait_for(lambda: [one.stage for one in requests_of(decode)] == ["queued"], "it is listed")
    assert ask(decode, lambda client: client.abort("t", reason="nobody waits"))
    assert decode.wait_until_failed("b") == "nobody waits"
    assert not ask(decode, lambda client: client.abort("t")) and decode.outcomes("decode") == {"aborted": 1}


def test_a_drain_waits_for_what_is_in_flight_and_is_undone(pair: Pair) -> None:
    source, decode = pair()
    source.sends("a", "t")
    assert ask(source, lambda client: client.drain(budget_s=1.0)) == 1  # the deadline of the call, with its connection
    status = status_of(source)
    assert (status.state, status.draining, status.ready, status.not_ready_reason) == (
        "draining",
        True,
        False,
        "the node is draining",
    )
    with pytest.raises(HTTPError, match="503"):
        read(source, "/readyz")
    wait_for(lambda: [peer.state for peer in status_of(decode).peers] == ["draining"], "the decode side has the drain")
    decode.fetches("b", "t", source)  # the engine has the prompt, and finishes it
    assert decode.settled("b").failure == ""
    source.freed("a")
    assert ask(source, lambda client: client.drain(budget_s=TIMEOUT_S)) == 0
    assert ask(source, NodeClient.undrain) and not ask(source, NodeClient.undrain)
    assert status_of(source).ready and read(source, "/readyz") == "ready\n"
    wait_for(decode.joined, "the decode side has the end of the drain")
    hand_over(source, decode, "c")


def test_a_draining_decode_side_still_fetches_prompts_of_its_engine(pair: Pair) -> None:
    source, decode = pair()
    assert ask(decode, lambda client: client.drain(budget_s=TIMEOUT_S)) == 0
    assert status_of(decode).draining
    hand_over(source, decode, "a")


def test_the_log_level_is_set(start: Start) -> None:
    source = start(PREFILL)
    before = log_level()
    try:
        assert ask(source, lambda client: client.set_log_level("debug")) == before
        assert log_level() == status_of(source).log_level == "debug"
        with pytest.raises(ConfigError, match="level is 'loud'"):
            ask(source, lambda client: client.set_log_level("loud"))
    finally:
        set_log_level(before)


def test_an_engines_own_settings_decide_its_role(start: Start) -> None:
    with pytest.raises(TransferError, match="this kvferry is inside an engine"):
        ask(start(PREFILL), lambda client: client.switch_role("decode", budget_s=1.0))


def test_an_instance_of_both_sides_shows_both(start: Start) -> None:
    source = start(PREFILL)
    both = start(PREFILL | DECODE, settings={"peers.prefill_nodes": (source.leader.address,)})
    wait_for(both.joined, "joined")
    both.sends("a", "t")
    both.leader.want("b", "u", source.leader.address, PROMPT)

    def sides(status: pb.NodeStatus) -> tuple[str, list[str]]:
        return status.role, [peer.address for peer in status.peers]

    status = status_of(both)
    assert sides(status) == ("decode", [source.leader.address]) and sides(status.other_side) == ("prefill", [])
    assert status.instance == status.other_side.instance and status.ranks[0].ring_capacity
    wait_for(lambda: {one.role for one in requests_of(both)} == {"prefill", "decode"}, "both sides have one")

    async def of_each_service() -> list[pb.NodeStatus]:
        async with grpc.aio.insecure_channel(both.leader.address) as channel:
            stubs: list[Any] = [pb_grpc.PrefillControlStub(channel), pb_grpc.DecodeControlStub(channel)]
            return [await stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S) for stub in stubs]

    found = run(of_each_service())
    assert [one.role for one in found] == ["prefill", "decode"] and not any(one.HasField("other_side") for one in found)
    seen = kvferry("top", both.leader.address)
    assert sorted((node["status"]["role"], node["address"] == both.leader.address) for node in seen["nodes"]) == [
        ("decode", True),
        ("prefill", False),
        ("prefill", True),
    ]
    listed = {(node["status"]["role"], one["role"]) for node in seen["nodes"] for one in node["requests"]}
    assert listed == {("decode", "decode"), ("prefill", "prefill")}


def test_commands_and_the_page_show_an_instance(pair: Pair) -> None:
    source, decode = pair({"tp_size": 2})
    hand_over(source, decode, "a")
    status = kvferry("status", "--target", source.leader.address)
    assert (status["role"], status["state"], len(status["ranks"]), len(status["links"])) == ("prefill", "ready", 2, 2)
    seen = kvferry("top", decode.leader.address)
    statuses = [node["status"] for node in seen["nodes"]]
    assert [(status["role"], status["state"]) for status in statuses] == [("prefill", "ready"), ("decode", "ready")]
    assert "<title>" in read(decode, "/")
    page = json.loads(read(decode, "/status.json"))
    assert (page["node"]["role"], page["requests"]["total"]) == ("decode", 0)
    [other] = page["others"]
    assert (other["address"], other["status"]["role"]) == (source.leader.address, "prefill")


def test_the_page_is_served_only_if_the_settings_enable_it(start: Start) -> None:
    with pytest.raises(HTTPError, match="404"):
        read(start(PREFILL, settings={"status_page.enabled": False}), "/")


@contextmanager
def discovery(kind: str, source: Callable[..., Instance], folder: Path) -> Iterator[tuple[Instance, dict[str, Any]]]:
    """Start a prefill side, and return the settings by which a decode side finds it."""
    if kind == "etcd":
        with etcd_server(folder) as server:
            run(server.start())
            found: dict[str, Any] = {"discovery.kind": "etcd", "discovery.etcd_endpoints": (server.endpoint,)}
            yield source(settings=found), found
        return
    instance = source()
    address = instance.leader.address
    if kind == "dns":
        yield instance, {"discovery.kind": "dns", "discovery.dns_name": address}
    else:
        (folder / "nodes.yaml").write_text(f"[{address!r}]")
        yield instance, {"discovery.file": folder / "nodes.yaml"}


@pytest.mark.parametrize("kind", ["static", "dns", "etcd"])
def test_a_prefill_side_is_found(start: Start, tmp_path: Path, kind: str) -> None:
    with discovery(kind, lambda **said: start(PREFILL, **said), tmp_path) as (source, found):
        decode = start(DECODE, settings=found)
        wait_for(decode.joined, "it is found and joined")
        assert list(status_of(decode).discovery.addresses) == [source.leader.address]
        assert "kvferry_discovery_addresses" in read(decode, "/metrics")
        hand_over(source, decode, "a")
        if kind == "etcd":
            assert list(status_of(source).discovery.addresses) == [source.leader.address]
            ask(source, lambda client: client.drain(budget_s=TIMEOUT_S))
            wait_for(lambda: not status_of(source).discovery.addresses, "a side that drains is registered no more")
        for instance in (decode, source):
            instance.close()


def test_both_sides_record_one_trace_inside_that_of_the_engine(start: Start) -> None:
    collector = Collector()
    with listening(collector) as port:
        traced = {"tracing.endpoint": f"http://127.0.0.1:{port}"}
        source = start(PREFILL, tp_size=2, settings=traced)
        decode = start(DECODE, settings=traced | {"peers.prefill_nodes": (source.leader.address,)})
        wait_for(decode.joined, "joined")
        decode.fetches("b", "t", source, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
        source.sends("a", "t")
        assert decode.settled("b").failure == ""
        source.freed("a")
        names = {"kvferry.fetch", "kvferry.try", "kvferry.prefill", "kvferry.send", "kvferry.receive", "kvferry.gather"}
        spans = collector.until(TRACE, [*names, "kvferry.queue", "kvferry.queue", "kvferry.send"])
        decode.close()
        source.close()
    by_name = {span.name: span for span in spans}
    parents = {span.span_id: span.name for span in spans}
    assert by_name["kvferry.fetch"].parent_id == "00f067aa0ba902b7" and not any(span.is_error for span in spans)
    assert parents[by_name["kvferry.try"].parent_id] == "kvferry.fetch"
    assert parents[by_name["kvferry.prefill"].parent_id] == "kvferry.try"
    assert parents[by_name["kvferry.send"].parent_id] == "kvferry.prefill"
    assert parents[by_name["kvferry.receive"].parent_id] == "kvferry.try"
    assert {span.process for span in spans} == {
        "kvferry-decode", "kvferry-decode/0", "kvferry-prefill", "kvferry-prefill/0", "kvferry-prefill/1",
    }  # fmt: skip
    assert by_name["kvferry.fetch"].attributes == {
        "kvferry.request_id": "t", "kvferry.prompt_tokens": len(PROMPT), "kvferry.retries": 0,
    }  # fmt: skip


def test_a_fetch_that_fails_ends_its_span_with_the_reason(start: Start) -> None:
    collector = Collector()
    with listening(collector) as port:
        decode = start(DECODE, settings={"tracing.endpoint": f"http://127.0.0.1:{port}"})
        decode.leader.want("b", "t", "127.0.0.1:1", PROMPT, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
        reason = decode.wait_until_failed("b")
        (span,) = [span for span in collector.until(TRACE, ["kvferry.fetch"]) if span.name == "kvferry.fetch"]
        assert span.is_error and span.attributes["kvferry.error"] == reason
        decode.close()
