"""A decode leader's own affairs: what it refuses before anything starts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from decode_node import node as node_module
from decode_node.node import DecodeNode
from decode_node.rank_messages import CODEC, PART_BYTES, RunStep, StepPart, check_step_fits
from decode_node.request_state import Done, Tokens
from node_runtime.daemon import Daemon, NodeState
from node_runtime.transfer_ids import MAX_REQUEST_ID_CHARS, new_transfer_id
from tests.runtime.instances import decode_config
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.errors import ConfigError, StagingError
from transfer.pb import kvferry_pb2 as pb

DAEMON = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None))
MOST_RUNNING = MAX_PAYLOAD_BYTES // PART_BYTES - 1


def test_a_step_larger_than_a_message_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = decode_config(tmp_path, limits={"max_running_requests": MOST_RUNNING + 1})
    refusal = f"limits.max_running_requests is {MOST_RUNNING + 1}; .* takes 1048576: it can be at most {MOST_RUNNING}"
    with pytest.raises(ConfigError, match=refusal):
        DecodeNode(DAEMON, config)


def test_the_largest_step_that_is_allowed_fits_its_message(tmp_path: Path) -> None:
    assert MOST_RUNNING > 2000
    check_step_fits(decode_config(tmp_path, limits={"max_running_requests": MOST_RUNNING}))
    longest = new_transfer_id("\U0001f600" * MAX_REQUEST_ID_CHARS)
    part = StepPart(request_id=longest, token_id=2**32 - 1, position=2**32 - 1)
    assert len(CODEC.encode(RunStep(step=2**62, parts=(part,) * MOST_RUNNING))) <= MAX_PAYLOAD_BYTES


async def test_the_prompts_that_wait_to_be_tokenised_are_bounded_also_when_their_callers_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each can have 16 MB, and is not in the queue yet whose length is bounded."""
    gate = asyncio.Event()

    async def encode(text: str, *, max_tokens: int) -> tuple[int, ...]:
        await gate.wait()
        return tuple(map(ord, text[:max_tokens]))

    monkeypatch.setattr(node_module, "TextCodec", lambda directory: SimpleNamespace(encode=encode))
    node = DecodeNode(DAEMON, decode_config(tmp_path, limits={"max_queued_requests": 2}))
    stays, leaves = (asyncio.ensure_future(node._tokenise(text, max_tokens=9)) for text in ("ab", "c"))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    with pytest.raises(StagingError, match=r"2 prompts wait to be tokenised, .*limits\.max_queued_requests"):
        await node._tokenise("d", max_tokens=9)
    gate.set()
    assert await stays == (97, 98)
    await asyncio.sleep(0)
    assert await node._tokenise("d", max_tokens=9) == (100,)


@pytest.mark.parametrize("goes_away", [False, True])
async def test_a_drain_waits_for_a_text_that_is_being_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes_away: bool
) -> None:
    """Its call has been let in, and its client has been promised an answer; it is in no queue yet."""
    gate = asyncio.Event()

    async def encode(text: str, *, max_tokens: int) -> tuple[int, ...]:
        await gate.wait()
        return tuple(map(ord, text))

    class Requests:
        num_queued = 0
        num_running = 0

        def submit(self, request_id: str, token_ids: tuple[int, ...], *rest: Any, **more: Any) -> Any:
            self.num_queued = 1
            return SimpleNamespace(token_ids=token_ids, progress=asyncio.Queue(), is_told=False)

        def give_up(self, *_: Any) -> None:
            self.num_queued = 0

    monkeypatch.setattr(node_module, "TextCodec", lambda directory: SimpleNamespace(encode=encode))
    node = DecodeNode(DAEMON, decode_config(tmp_path))
    node._life = cast(
        Any, SimpleNamespace(max_context_tokens=64, vocab_size=1000, eos_token_ids=frozenset(), requests=Requests())
    )
    events = node.Generate(pb.GenerateRequest(prompt="ab", max_new_tokens=4), cast(Any, SimpleNamespace()))
    begun = asyncio.ensure_future(anext(events))
    async with asyncio.timeout(10):
        while not node._tokenising:
            await asyncio.sleep(0)
        draining = asyncio.ensure_future(node.drain())
        await asyncio.sleep(0.1)
        assert node.num_in_flight == 1 and not draining.done()
        if goes_away:
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
        else:
            gate.set()
            assert (await begun).accepted.prompt_tokens == 2
            assert node.num_in_flight == 1 and not draining.done(), "it is in the queue now, once"
            await events.aclose()
        assert await draining == 0 == node.num_in_flight


async def test_a_drain_waits_for_a_client_that_has_not_taken_all_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is over for the node, and its last tokens wait for a connection that is slow."""
    progress: asyncio.Queue[Any] = asyncio.Queue()
    accepted = SimpleNamespace(token_ids=(5, 6), progress=progress, is_told=False, told_s=0.0)

    class Requests:
        num_queued = num_running = 0

        def submit(self, request_id: str, token_ids: tuple[int, ...], *rest: Any, **more: Any) -> Any:
            return accepted

        def give_up(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(node_module, "TextCodec", lambda directory: SimpleNamespace())
    node = DecodeNode(DAEMON, decode_config(tmp_path))
    node._life = cast(
        Any, SimpleNamespace(max_context_tokens=64, vocab_size=1000, eos_token_ids=frozenset(), requests=Requests())
    )
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), max_new_tokens=4)
    events = node.Generate(request, cast(Any, SimpleNamespace()))
    assert (await anext(events)).accepted.prompt_tokens == 2
    progress.put_nowait(Tokens(token_ids=(7,), text=" a"))
    progress.put_nowait(
        Done(finish_reason="length", stats=pb.TransferStats(), ttft_s=0.1, prefill_node="p:1", retries=0, cached_tokens=0)
    )
    accepted.is_told, accepted.told_s = True, time.monotonic()
    draining = asyncio.ensure_future(node.drain())
    assert (await anext(events)).tokens.token_ids == [7]
    await asyncio.sleep(0.1)
    assert node.num_in_flight == 1 and not draining.done()
    accepted.told_s -= node_module.READ_S
    assert node.num_in_flight == 0, "who has not read for so long may never"
    accepted.told_s += node_module.READ_S
    assert (await anext(events)).done.finish_reason == "length"
    assert [event async for event in events] == []
    async with asyncio.timeout(10):
        assert await draining == 0 == node.num_in_flight


@pytest.mark.parametrize("drains", [False, True])
async def test_a_node_that_drains_lets_nothing_new_wait_for_a_prefill_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    """Of what it had let in before; a call that comes later is refused anyway."""
    monkeypatch.setattr(node_module, "TextCodec", lambda directory: None)
    node = DecodeNode(DAEMON, decode_config(tmp_path))
    asked: list[bool] = []

    def submit(*_: object, may_wait: bool, **__: object) -> None:
        asked.append(may_wait)

    life = SimpleNamespace(max_context_tokens=9, vocab_size=9, eos_token_ids=frozenset(), requests=SimpleNamespace(submit=submit))
    node._life = cast(Any, life)
    if drains:
        node._draining.begin()
    await node._submit(cast(Any, life), pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), max_new_tokens=1))
    assert asked == [not drains]


@pytest.mark.parametrize("looks_again", [False, True])
async def test_how_often_discovery_looks_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_again: bool) -> None:
    monkeypatch.setattr(node_module, "TextCodec", lambda directory: None)
    daemon = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None, num_restarts=0))
    found = {"discovery": {"file": tmp_path / "nodes", "interval_s": 7}, "peers": {"prefill_nodes": []}} if looks_again else {}
    node = DecodeNode(daemon, decode_config(tmp_path, **found))
    shown = 7.0 if looks_again else 0.0
    assert f'kvferry_discovery_interval_seconds{{role="decode"}} {shown}\n' in node.render_metrics().decode()


async def test_neither_log_nor_span_quotes_a_request_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    span = SimpleNamespace(end=ended.append, set=lambda **_: None)
    monkeypatch.setattr(node_module, "TextCodec", lambda directory: SimpleNamespace())
    node = DecodeNode(DAEMON, decode_config(tmp_path))
    node._life = cast(Any, SimpleNamespace(max_context_tokens=64, vocab_size=1000, eos_token_ids=frozenset()))
    node.tracer = cast(Any, SimpleNamespace(begin=lambda *_, **__: span))

    class Context:
        def invocation_metadata(self) -> tuple[()]:
            return ()

        async def abort(self, code: Any, details: str, trailing_metadata: object = ()) -> None:
            raise ConnectionAbortedError(details)

    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 987_654]), max_new_tokens=4)
    with capture_logs() as lines, pytest.raises(ConnectionAbortedError, match="987654"):  # its caller is told
        await anext(node.Generate(request, cast(Any, Context())))
    (line,) = [line for line in lines if line["event"] == "request_refused"]
    assert ended == [line["reason"]] == ["the request is wrong; its caller was told what of it"]
