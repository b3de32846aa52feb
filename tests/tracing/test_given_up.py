"""The stage at which a request was given up has a span with the reason, on both tiers. No span of a request stays open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_node import node as node_module
from decode_node.node import DecodeNode
from node_runtime.daemon import Daemon, NodeState
from tests.decode.leader_world import World as DecodeWorld
from tests.decode.leader_world import turns
from tests.decode.local_nodes import LocalContext
from tests.prefill.leader_world import World as PrefillWorld
from tests.runtime.instances import decode_config, hello
from tests.tracing.collector import Collector, listening
from tests.tracing.told_span import ToldSpan
from transfer.config import TracingConfig
from transfer.engine_types import SamplingParams
from transfer.errors import PeerUnreachable, TransferAborted
from transfer.metrics import MetricsPage
from transfer.pb import kvferry_pb2 as pb


@pytest.fixture
async def decode() -> AsyncIterator[DecodeWorld]:
    world = DecodeWorld(queue_timeout_s=0.05, prefill_retries=1)
    yield world
    await world.close()


@pytest.fixture
async def prefill() -> AsyncIterator[PrefillWorld]:
    world = PrefillWorld(queue_timeout_s=0.05)
    yield world
    await world.close()


def submitted(world: DecodeWorld, span: ToldSpan) -> None:
    world.accepted.append(world.leader.submit("a", (1, 2, 3), 5, SamplingParams(), frozenset(), span=span))


async def generating(world: DecodeWorld) -> None:
    await turns()
    reserving = world.reserve("a")
    await turns()
    for rank in range(2):
        world.expected(rank, "a")
    await reserving
    for rank in range(2):
        world.complete(rank, "a")
    world.call("a").first_token()
    await turns()


async def test_a_request_that_found_no_room_has_waited_in_vain(decode: DecodeWorld) -> None:
    span = ToldSpan()
    submitted(decode, span)
    async with asyncio.timeout(10):
        while not decode.outcomes:
            await asyncio.sleep(0.01)
    why = "no room within 0.05 s (limits.queue_timeout_s)"
    assert span.told == [("kvferry.try", why), ("kvferry.queue", why)] and span.error == why


async def test_a_request_that_is_cut_off_while_it_generates_has_a_span_of_that(decode: DecodeWorld) -> None:
    span = ToldSpan()
    submitted(decode, span)
    await generating(decode)
    decode.transfers.give_up(decode.accepted[0], TransferAborted("the client went away"))
    assert span.told[1:] == [("kvferry.queue", ""), ("kvferry.decode", "the client went away")]
    assert span.error == "the client went away"


async def test_each_try_has_its_wait(decode: DecodeWorld) -> None:
    span = ToldSpan()
    submitted(decode, span)
    await turns()
    decode.lose(decode.peer)
    await turns()
    why = "prefill node prefill:1 is lost: it is silent"
    assert span.told == [("kvferry.try", why), ("kvferry.queue", why), ("kvferry.try", None)] and span.error is None


async def test_a_prompt_that_found_no_room_has_waited_in_vain(prefill: PrefillWorld) -> None:
    span = ToldSpan()
    prefill.answers["a"] = False
    prefill.submit("a", 3, span=span)
    async with asyncio.timeout(10):
        while not prefill.outcomes:
            await asyncio.sleep(0.01)
    why = "no room within 0.05 s (limits.queue_timeout_s)"
    assert span.told == [("kvferry.queue", why)] and span.error == why


async def test_a_prompt_whose_step_fails_has_a_span_of_that(prefill: PrefillWorld) -> None:
    span = ToldSpan()
    prefill.submit("a", 3, span=span)
    await turns()
    prefill.fail_step()
    assert span.told == [("kvferry.queue", ""), ("kvferry.compute", "the engine failed")]


async def test_a_client_that_leaves_while_its_text_is_tokenised_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, span = asyncio.Event(), asyncio.Event(), ToldSpan()

    async def encode(text: str, *, max_tokens: int) -> tuple[int, ...]:
        begun.set()
        await gate.wait()
        return tuple(map(ord, text))

    monkeypatch.setattr(node_module, "TextCodec", lambda directory: SimpleNamespace(encode=encode))
    node = DecodeNode(
        cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None, readiness_changed=lambda: None)),
        decode_config(tmp_path),
    )
    node.tracer = cast(Any, SimpleNamespace(begin=lambda *told, **more: span, close=lambda: None))
    await node.begin_life((hello(0),))
    question = pb.GenerateRequest(prompt="ab", max_new_tokens=4)
    calling = asyncio.ensure_future(anext(node.Generate(question, cast(Any, LocalContext()))))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert span.error == "the client went away"
    page = MetricsPage().render(node.metrics.collect(()))[0].decode()
    assert 'kvferry_requests_total{outcome="aborted",role="decode"} 1.0' in page
    assert 'kvferry_aborts_total{reason="caller",role="decode"} 1.0' in page
    gate.set()
    await node.end_life(PeerUnreachable("the test is over"))


def test_a_span_that_is_told_afterwards_can_have_failed() -> None:
    from node_runtime.tracing_client import OtelTracer

    collector = Collector()
    with listening(collector) as port:
        tracer = OtelTracer(TracingConfig(endpoint=f"http://127.0.0.1:{port}"), role="decode")
        span = tracer.begin("kvferry.generate")
        assert span is not None
        span.record("kvferry.queue", begun_s=1.0, ended_s=2.0, error="no room")
        span.record("kvferry.decode", begun_s=2.0, ended_s=3.0)
        span.end()
        tracer.close(30.0)
    told = {one.name: (one.is_error, dict(one.attributes)) for one in collector.all()}
    assert told["kvferry.queue"] == (True, {"kvferry.error": "no room"}) and told["kvferry.decode"] == (False, {})
