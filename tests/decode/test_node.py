"""A decode leader's own affairs: what it refuses before anything starts, and what its drain waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer, models, processors

from decode_node import node as node_module
from decode_node import requests as requests_module
from decode_node.node import READ_S, DecodeNode
from decode_node.rank_messages import CODEC, DRAFT_BYTES, PART_BYTES, DecodeStepPart, RunDecodeStep, check_step_fits
from decode_node.text import TextCodec
from node_runtime.daemon import Daemon, NodeState
from node_runtime.rank_messages import StepDone, StepFailed
from tests.decode.leader_world import Text, turns
from tests.decode.local_nodes import LocalContext, serve_locally
from tests.prefill.join_server import CUT, JoinServer
from tests.runtime.instances import decode_config, hello, until
from tests.runtime.virtual_time import in_virtual_time
from transfer.connector import incoming as incoming_module
from transfer.connector.messages import PagesReleased, TransferExpected, TransferWhole
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.errors import ConfigError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import chunk_plan_to_proto
from transfer.transfer_ids import MAX_REQUEST_ID_CHARS, new_transfer_id

DAEMON = cast(Daemon, SimpleNamespace(state=NodeState.READY, other_config=None, readiness_changed=lambda: None, num_restarts=0))
MOST_RUNNING = MAX_PAYLOAD_BYTES // PART_BYTES - 1
PREFILL = "localhost:1"


def test_a_step_larger_than_a_message_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = decode_config(tmp_path, limits={"max_running_requests": MOST_RUNNING + 1})
    refusal = f"limits.max_running_requests is {MOST_RUNNING + 1}; .* takes 1048576: it can be at most {MOST_RUNNING}"
    with pytest.raises(ConfigError, match=refusal):
        DecodeNode(DAEMON, config)


@pytest.mark.parametrize("num_drafts", [0, 32])
def test_the_largest_step_that_is_allowed_fits_its_message(tmp_path: Path, num_drafts: int) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": num_drafts} if num_drafts else {}
    most = MAX_PAYLOAD_BYTES // (PART_BYTES + DRAFT_BYTES * num_drafts) - 1
    assert most > 1500
    check_step_fits(decode_config(tmp_path, limits={"max_running_requests": most}, speculative=speculative))
    with pytest.raises(ConfigError, match=f"it can be at most {most}"):
        check_step_fits(decode_config(tmp_path, limits={"max_running_requests": most + 1}, speculative=speculative))
    longest = new_transfer_id("\U0001f600" * MAX_REQUEST_ID_CHARS)
    drafts = (2**32 - 1,) * num_drafts
    part = DecodeStepPart(request_id=longest, token_id=2**32 - 1, position=2**32 - 1, draft_token_ids=drafts)
    assert len(CODEC.encode(RunDecodeStep(step=2**62, parts=(part,) * most))) <= MAX_PAYLOAD_BYTES


class GatedText(Text):
    """A `TextCodec` whose texts are tokenised once the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def encode(self, text: str, *, max_tokens: int) -> tuple[int, ...]:
        await self.gate.wait()
        return tuple(map(ord, text[:max_tokens]))


class ComputingNode(JoinServer):
    """Computes a prompt once it has room and the test says so."""

    def __init__(self) -> None:
        super().__init__(11)
        self.asked: list[str] = []
        self.is_computed = asyncio.Event()

    async def Join(self, request: pb.JoinRequest, context: Any) -> AsyncGenerator[pb.JoinEvent, None]:
        request.decode_address = "127.0.0.1:1"  # the decode node has none, because it is not open
        async for event in super().Join(request, context):
            yield event

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> AsyncGenerator[pb.PrefillEvent, None]:
        self.asked.append(request.request_id)
        await self.is_computed.wait()
        yield pb.PrefillEvent(first_token=pb.FirstToken(token_id=7))
        yield pb.PrefillEvent(sent=pb.PrefillSent(stats=pb.TransferStats()))


class Serving:
    """A decode node whose one rank is the test, and its prefill node."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.text, self.prefill = GatedText(), ComputingNode()
        self.prefill_nodes: dict[str, JoinServer] = {}
        serve_locally(monkeypatch, self.prefill_nodes)
        clock = SimpleNamespace(monotonic=asyncio.get_running_loop().time)
        for module in (node_module, requests_module, incoming_module):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(node_module, "TextCodec", lambda directory: self.text)
        self.node = DecodeNode(DAEMON, decode_config(folder, **settings))
        self._calls: list[AsyncGenerator[pb.GenerateEvent, None]] = []

    def generate(self, *, prompt: str = "", token_ids: tuple[int, ...] = ()) -> AsyncGenerator[pb.GenerateEvent, None]:
        request = pb.GenerateRequest(max_new_tokens=1)
        if prompt:
            request.prompt = prompt
        else:
            request.token_ids.ids.extend(token_ids)
        call = cast(AsyncGenerator[pb.GenerateEvent, None], self.node.Generate(request, cast(Any, LocalContext())))
        self._calls.append(call)
        return call

    async def join(self) -> None:
        self.prefill_nodes[PREFILL] = self.prefill
        await until(lambda: self.node.readiness().is_ready)

    async def compute(self) -> None:
        """The prompt that the prefill node was asked for: room, KV, the first token, and the pages back."""
        (name,) = self.prefill.asked
        assert self.node.life is not None
        question = pb.ReserveRequest(
            request_id=name,
            prefill_incarnation=self.prefill.instance.incarnation,
            decode_incarnation=self.node.life.instance.incarnation,
            chunk_plan=chunk_plan_to_proto(CUT.plan),
        )
        reserving = asyncio.ensure_future(self.node.Reserve(question, cast(Any, LocalContext())))
        await turns()
        self.node.ranks.on_message(0, TransferExpected(transfer_id=name))
        assert (await reserving).reserved
        self.node.ranks.on_message(0, TransferWhole(transfer_id=name))
        self.prefill.is_computed.set()
        await turns()
        self.node.ranks.on_message(0, PagesReleased(transfer_id=name))

    async def close(self) -> None:
        await self.node.end_life(PeerUnreachable("the test is over"))
        for call in self._calls:
            await call.aclose()


@asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Serving]:
    one = Serving(folder, monkeypatch, **settings)
    await one.node.begin_life((replace(hello(0), address="127.0.0.1:2", ring_bytes=1 << 20),))
    assert one.node.life is not None
    one.node.life.use([PREFILL])
    try:
        yield one
    finally:
        await one.close()


def begin(call: AsyncGenerator[pb.GenerateEvent, None]) -> asyncio.Task[pb.GenerateEvent]:
    return asyncio.ensure_future(anext(call))  # type: ignore[arg-type]


@in_virtual_time
async def test_the_prompts_that_wait_to_be_tokenised_are_bounded_also_when_their_callers_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each can have 16 MB, and is not in the queue yet whose length is bounded."""
    async with serving(tmp_path, monkeypatch, limits={"max_queued_requests": 2}) as one:
        stays, leaves = begin(one.generate(prompt="ab")), begin(one.generate(prompt="c"))
        await turns()
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        with pytest.raises(grpc.aio.AioRpcError, match=r"2 prompts wait to be tokenised, .*limits\.max_queued_requests"):
            await begin(one.generate(prompt="a"))
        one.text.gate.set()
        assert (await stays).accepted.prompt_tokens == 2
        await turns()
        assert (await begin(one.generate(prompt="a"))).accepted.prompt_tokens == 1


@pytest.mark.parametrize("end", ["its client goes away", "no prefill node is joined", "it is queued"])
@in_virtual_time
async def test_a_drain_waits_for_a_text_that_is_being_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its call was let in, and it is in no queue yet. A node that drains lets it wait for no prefill node."""
    async with serving(tmp_path, monkeypatch) as one:
        if end == "it is queued":
            await one.join()
        call = one.generate(prompt="ab")
        begun = begin(call)
        await turns()
        draining = asyncio.ensure_future(one.node.drain())
        await asyncio.sleep(10.0)
        assert one.node.num_in_flight == 1 and not draining.done()
        if end == "its client goes away":
            begun.cancel()
            await asyncio.gather(begun, return_exceptions=True)
        else:
            one.text.gate.set()
        if end == "no prefill node is joined":
            with pytest.raises(grpc.aio.AioRpcError, match="no prefill node is joined"):
                await begun
        if end == "it is queued":
            assert (await begun).accepted.prompt_tokens == 2
            await asyncio.sleep(10.0)
            assert one.node.num_in_flight == 1 and not draining.done(), "it is in the queue now, once"
            await call.aclose()
        assert await draining == 0 == one.node.num_in_flight


@pytest.mark.parametrize("reads", [True, False])
@in_virtual_time
async def test_a_drain_waits_for_a_client_that_has_not_taken_all_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    """The request is over for the node, and its last tokens wait for a slow connection. A client may never read them."""
    async with serving(tmp_path, monkeypatch) as one:
        await one.join()
        call = one.generate(token_ids=(5, 6))
        assert (await begin(call)).accepted.prompt_tokens == 2
        await until(lambda: one.prefill.asked)
        await one.compute()
        draining = asyncio.ensure_future(one.node.drain())
        assert (await anext(call)).tokens.token_ids == [7]
        await asyncio.sleep(READ_S / 2)
        assert one.node.num_in_flight == 1 and not draining.done()
        if reads:
            assert (await anext(call)).done.finish_reason == "length"
            assert [event async for event in call] == []
        else:
            await asyncio.sleep(READ_S)
        assert await draining == 0 == one.node.num_in_flight


@in_virtual_time
async def test_outcomes_after_the_engine_is_lost_do_not_hide_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has died in step 1, and another rank reports its overlapping step 2, which had nothing left to compute."""
    lost: list[str] = []
    async with serving(tmp_path, monkeypatch) as one:
        monkeypatch.setattr(one.node, "lose", lost.append)
        one.node.ranks.on_message(0, StepFailed(step=1, request_ids=("a",), reason="connection closed", is_fatal=True))
        one.node.ranks.on_message(0, StepDone(step=2, tokens={}, compute_s=0.0))
    assert lost == ["rank 0: connection closed"]


@in_virtual_time
async def test_neither_log_nor_span_quotes_a_request_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    span = SimpleNamespace(end=ended.append, set=lambda **_: None)
    async with serving(tmp_path, monkeypatch) as one:
        one.node.tracer = cast(Any, SimpleNamespace(begin=lambda *_, **__: span))
        with (
            capture_logs() as lines,
            pytest.raises(grpc.aio.AioRpcError, match="987654"),
        ):  # the caller gets the value, the log does not
            await begin(one.generate(token_ids=(5, 987_654)))
    (line,) = [line for line in lines if line["event"] == "request_refused"]
    assert ended == [line["reason"]] == ["the request is wrong; its caller was told what of it"]


async def test_an_empty_text_is_refused_where_the_tokenizer_begins_every_text_with_a_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "word": 1}, unk_token="<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert await TextCodec(tmp_path).encode("", max_tokens=64) == (0,)
    node = DecodeNode(DAEMON, decode_config(tmp_path))
    await node.begin_life((hello(0),))
    with pytest.raises(grpc.aio.AioRpcError, match="prompt is empty; it must have at least one character"):
        await anext(node.Generate(pb.GenerateRequest(prompt="", max_new_tokens=4), cast(Any, LocalContext())))
    await node.end_life(PeerUnreachable("the test is over"))


async def test_a_node_joins_its_group_of_the_listed_prefill_nodes(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"word": 0}, unk_token="word")).save(str(tmp_path / "tokenizer.json"))
    listed = [f"127.0.0.1:{port}" for port in range(1, 9)]
    node = DecodeNode(DAEMON, decode_config(tmp_path, placement={"group_size": 3}))
    await node.begin_life((hello(0),))
    assert node.life is not None
    node.life.use(listed)
    group = [peer.address for peer in node.life.peers.peers]
    assert len(group) == 3 and set(group) < set(listed)
    node.life.use([address for address in listed if address != group[0]])
    named = [peer.address for peer in node.life.peers.peers if peer.unnamed_s is None]
    assert len(named) == 3 and set(group[1:]) < set(named), "another node takes the place"
    await node.end_life(PeerUnreachable("the test is over"))
