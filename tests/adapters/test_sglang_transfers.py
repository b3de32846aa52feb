"""Prompts of SGLang's schedulers: their states over real hand-offs between two instances in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.engines.connector import DECODE, PREFILL, ConnectorEngine, Sides
from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from kvferry.engines.sglang_layout import MorePages
from kvferry.engines.sglang_transfers import (
    MAX_EARLY_PROMPTS,
    IncomingPrompt,
    OutgoingPrompt,
    Poll,
    SchedulerPrompts,
    pack_note,
    unpack_note,
)
from transfer.config import ConnectorConfig
from transfer.connector.outgoing_rank import Wanted
from transfer.errors import IntegrityError
from transfer.layer_groups import GroupKind, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard
from transfer.load_config import load_config
from transfer.pool.kv_pool import LayerBuffers, PoolView

LAYOUT = KVLayout.uniform(num_layers=2, num_kv_heads=2, head_dim=8, dtype=DType.FLOAT32)
WINDOW_TOKENS = 10
MIXED = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=2, k_head_dim=8, v_head_dim=8),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=2, k_head_dim=8, v_head_dim=8, window_tokens=WINDOW_TOKENS),
        LayerSpec(kind=LayerKind.RECURRENT_STATE, num_kv_heads=2, k_head_dim=8, v_head_dim=0, dtype=DType.FLOAT32),
    ),
    dtype=DType.FLOAT32,
)
PAGES = 32
WAIT_S = 60.0
LIMITS = {"tls.insecure": 1, "join_on_request": True, "limits.prefill_retries": 0}


class Host:
    """One rank with its leader, as SGLang's first scheduler has them."""

    def __init__(self, name: str, sides: Sides, page_size: int, model: str = "numbers", *, layout: KVLayout = LAYOUT) -> None:
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        for spec in layout.layers:
            page = 1 if spec.kind is LayerKind.RECURRENT_STATE else page_size
            self.k.append(torch.zeros((PAGES, page, 2, spec.k_head_dim)))
            self.v.append(torch.zeros((PAGES, page, 2, spec.v_head_dim)))
        shard = Shard(page_size=page_size)
        buffers = [LayerBuffers(k=k, v=v if v.numel() else None) for k, v in zip(self.k, self.v, strict=True)]
        engine = ConnectorEngine(
            layout=layout,
            shard=shard,
            pool=PoolView(layout=layout, shard=shard, buffers=buffers),
            model_fields={"architecture": model},
            max_context_tokens=400,
            vocab_size=2**31,
        )
        config = load_config(ConnectorConfig, flags=LIMITS)
        self.rank = ConnectorRank(config, instance=name, rank=0, sides=sides, engine=engine)
        self.leader = ConnectorLeader(config, instance=name, num_ranks=1, sides=sides)
        self.leader.start()

    def close(self) -> None:
        self.leader.close()
        self.rank.close()


@dataclass
class Engines:
    """A prefill engine and a decode engine, and what SGLang knows of both."""

    prefill: Host
    decode: Host
    outgoing: SchedulerPrompts
    incoming: SchedulerPrompts
    notes: dict[int, bytes] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    num_rooms: int = 0

    def room(self) -> int:
        self.num_rooms += 1
        return 2**63 + self.num_rooms

    def offered(self, room: int, token_ids: tuple[int, ...]) -> OutgoingPrompt:
        """Let decode fetch a prompt."""
        prompt = OutgoingPrompt(self.outgoing, room, read_note=lambda index: b"note %d" % index)
        prompt.offer(token_ids)
        return prompt

    def wanted(
        self,
        room: int,
        token_ids: tuple[int, ...],
        pages: list[int],
        prefix_tokens: int = 0,
        address: str = "",
        more_pages: MorePages | None = None,
    ) -> IncomingPrompt:
        """Fetch a prompt into pages of decode, from a prefill engine at `address`, by default `prefill`."""
        prompt = IncomingPrompt(
            self.incoming, room, bootstrap="bootstrap:1", write_note=self.notes.__setitem__, on_failed=self.failed.append
        )
        prompt.take(token_ids)
        assert prompt.poll() is Poll.BOOTSTRAPPING
        prompt.meet(address or self.prefill.leader.address)
        assert prompt.poll() is Poll.WAITING_FOR_INPUT
        prompt.bind(pages, room % 7, prefix_tokens, more_pages)
        return prompt


def running(layout: KVLayout) -> Iterator[Engines]:
    name, groups = f"test-sglang-{time.monotonic_ns()}", layer_groups(layout)
    prefill, decode = Host(f"{name}-p", PREFILL, 4, layout=layout), Host(f"{name}-d", DECODE, 8, layout=layout)
    outgoing = SchedulerPrompts(rank=prefill.rank, leader=prefill.leader, groups=groups, page_size=4, timeout_s=30.0)
    incoming = SchedulerPrompts(rank=decode.rank, leader=decode.leader, groups=groups, page_size=8, timeout_s=30.0)
    yield Engines(prefill=prefill, decode=decode, outgoing=outgoing, incoming=incoming)
    decode.close()
    prefill.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    yield from running(LAYOUT)


@pytest.fixture(scope="module")
def mixed() -> Iterator[Engines]:
    """Engines of a model with full attention, a window and a state."""
    yield from running(MIXED)


def until(look: Callable[[], Poll], *wanted: Poll) -> Poll:
    """The states on the way there; more than the wanted ones at the end is a failure."""
    deadline = time.monotonic() + WAIT_S
    while (state := look()) not in wanted:
        assert time.monotonic() < deadline, state
        assert state not in (Poll.FAILED, Poll.SUCCESS), state
        time.sleep(0.001)
    return state


def fill(host: Host, pages: list[int], page_size: int, num_tokens: int, layer: int | None = None) -> None:
    """Write every token's number, in all layers or in one."""
    for token in range(num_tokens):
        for each in (0, 1) if layer is None else (layer,):
            host.k[each][pages[token // page_size], token % page_size] = token + 1000 * each
            host.v[each][pages[token // page_size], token % page_size] = token + 1000 * each + 500


def test_a_prompt_in_chunks_into_pages_of_another_size(engines: Engines) -> None:
    room, tokens = engines.room(), tuple(range(30))
    out = engines.offered(room, tokens)
    assert out.poll() is Poll.BOOTSTRAPPING
    into = engines.wanted(room, tokens, [5, 9, 2, 7])
    until(out.poll, Poll.WAITING_FOR_INPUT)
    pages = [3, 1, 8, 20, 21, 11, 12, 30]
    fill(engines.prefill, pages, 4, 30)
    out.begin(8, note_index=4)
    assert out.poll() is Poll.WAITING_FOR_INPUT
    out.send(pages[:5], 20, None)
    assert out.poll() is Poll.TRANSFERRING
    assert into.poll() is Poll.WAITING_FOR_INPUT
    out.send(pages[5:], 10, None)
    until(into.poll, Poll.SUCCESS)
    until(out.poll, Poll.SUCCESS)
    assert engines.notes[room % 7] == b"note 4"
    for token in range(30):
        page = [5, 9, 2, 7][token // 8]
        assert engines.decode.v[1][page, token % 8, 1, 3] == token + 1500
    assert len(engines.outgoing) == len(engines.incoming) == 0
    assert out.num_pages_sent == 8


def test_events_of_a_prompt_that_the_scheduler_gets_later_are_kept(engines: Engines) -> None:
    """The leader's messages can reach another rank before SGLang gives it the prompt, while it polls another one."""
    other = SchedulerPrompts(rank=engines.prefill.rank, leader=None, groups=engines.outgoing.groups, page_size=4, timeout_s=30.0)
    first, second = engines.room(), engines.room()
    outs = [engines.offered(room, (*range(60, 67), room % 100)) for room in (first, second)]
    intos = [engines.wanted(room, (*range(60, 67), room % 100), [page]) for room, page in ((first, 3), (second, 4))]
    for _ in range(int(outs[0].name.rpartition(".")[2]) - 1):
        other.new_name(0)
    late, early = [OutgoingPrompt(other, room, read_note=lambda _: b"") for room in (first, second)]
    early.offer(())
    until(early.poll, Poll.WAITING_FOR_INPUT)
    late.offer(())
    until(late.poll, Poll.WAITING_FOR_INPUT)
    for prompt in (*intos, *outs):
        prompt.fail()
        until(prompt.poll, Poll.FAILED)


def test_of_early_events_those_of_the_newest_prompts_are_kept() -> None:
    events = [Wanted(name=f"{room}.{room}", start_token=room) for room in range(1, MAX_EARLY_PROMPTS + 2)]
    rank: Any = SimpleNamespace(poll_events=lambda: [events.pop(0) for _ in range(len(events))])
    prompts = SchedulerPrompts(rank=rank, leader=None, groups=(), page_size=4, timeout_s=30.0)
    prompts.look()
    for room in range(1, MAX_EARLY_PROMPTS + 2):
        prompt = OutgoingPrompt(prompts, room, read_note=lambda _: b"")
        prompt.offer(())
        assert prompt.state is (Poll.BOOTSTRAPPING if room == 1 else Poll.WAITING_FOR_INPUT)


def test_a_prefix_that_decode_has_is_not_sent(engines: Engines) -> None:
    room, tokens = engines.room(), tuple(range(100, 120))
    into = engines.wanted(room, tokens, [14], prefix_tokens=16)  # of 20 tokens, two pages of 8 are there already
    out = engines.offered(room, tokens)  # decode may ask first
    until(out.poll, Poll.WAITING_FOR_INPUT)
    assert out.start_token == 16
    fill(engines.prefill, [0, 0, 0, 0, 19], 4, 20)
    out.begin(1, note_index=0)
    out.send([19], 4, None)
    until(into.poll, Poll.SUCCESS)
    assert [float(engines.decode.k[0][14, offset, 0, 0]) for offset in range(4)] == [16, 17, 18, 19]
    until(out.poll, Poll.SUCCESS)


def test_a_prompt_that_decode_has_whole_brings_its_note(engines: Engines) -> None:
    room, tokens = engines.room(), tuple(range(200, 216))
    engines.decode.k[0][6:8] = -1.0
    into = engines.wanted(room, tokens, [], prefix_tokens=16)
    out = engines.offered(room, tokens)
    until(out.poll, Poll.WAITING_FOR_INPUT)
    assert out.start_token == 8  # some KV must come: it goes to page 0, which SGLang pads with
    out.begin(2, note_index=6)
    out.send([2, 4], 8, None)
    until(into.poll, Poll.SUCCESS)
    assert engines.notes[room % 7] == b"note 6"
    assert bool((engines.decode.k[0][6:8] == -1.0).all())
    until(out.poll, Poll.SUCCESS)


def test_another_prompt_under_the_same_room_fails_on_decode(engines: Engines) -> None:
    room = engines.room()
    out = engines.offered(room, (1, 2, 3))
    into = engines.wanted(room, (1, 2, 4), [3])
    until(into.poll, Poll.FAILED)
    assert "token_ids[2] is 4" in into.failure and engines.failed == ["bootstrap:1"]
    out.fail()
    assert out.poll() is Poll.FAILED
    until_empty(engines)


def test_an_abort_on_prefill_fails_decode_before_and_while_it_is_sent(engines: Engines) -> None:
    for begun in (False, True):
        room, tokens = engines.room(), tuple(range(40))
        out = engines.offered(room, tokens)
        into = engines.wanted(room, tokens, [1, 2, 3, 4, 5])
        until(out.poll, Poll.WAITING_FOR_INPUT)
        if begun:
            out.begin(10, note_index=0)
            out.send([1, 2, 3], 12, None)
        out.fail()
        if not begun:
            assert out.poll() is Poll.FAILED  # it had no pages
        until(out.poll, Poll.FAILED)
        until(into.poll, Poll.FAILED)
        assert "gave the request up" in into.failure
        until_empty(engines)


def test_an_abort_on_decode_fails_there_once_nothing_writes_and_prefill_soon(engines: Engines) -> None:
    room, tokens = engines.room(), tuple(range(40))
    out = engines.offered(room, tokens)
    into = engines.wanted(room, tokens, [1, 2, 3, 4, 5])
    until(out.poll, Poll.WAITING_FOR_INPUT)
    out.begin(10, note_index=0)
    out.send([1, 2, 3], 12, None)
    into.fail("the client is gone")
    into.fail("said twice")
    until(into.poll, Poll.FAILED)
    assert into.failure == "the client is gone"
    out.send(list(range(4, 11)), 28, None)  # SGLang computes on
    until(out.poll, Poll.FAILED)
    until_empty(engines)


def test_a_prefill_engine_of_another_model_fails_at_once(engines: Engines) -> None:
    other = Host(f"test-sglang-other-{time.monotonic_ns()}", PREFILL, 4, model="letters")
    begin = time.monotonic()
    try:
        into = engines.wanted(engines.room(), (1, 2, 3), [3], address=other.leader.address)
        until(into.poll, Poll.FAILED)
        assert "architecture: letters != numbers" in into.failure
        assert time.monotonic() - begin < 45.0  # and not when the time to meet is over, which is 60 s
    finally:
        other.close()


def test_a_room_cannot_be_used_again(engines: Engines) -> None:
    room, tokens = engines.room(), (5, 6, 7)
    out = engines.offered(room, tokens)
    into = engines.wanted(room, tokens, [3])
    until(out.poll, Poll.WAITING_FOR_INPUT)
    out.begin(1, note_index=0)
    out.send([1], 3, None)
    until(into.poll, Poll.SUCCESS)
    until(out.poll, Poll.SUCCESS)

    again = engines.offered(room, tokens)
    into = engines.wanted(room, tokens, [3])
    until(into.poll, Poll.FAILED)
    assert "is over: it was sent" in into.failure
    until(again.poll, Poll.FAILED)  # at once, and not when SGLang's time is over
    assert "was used before" in again.failure
    until_empty(engines)


def test_nobody_asks_and_nobody_sends_end_by_their_times(engines: Engines) -> None:
    now = [0.0]
    engines.outgoing.clock = engines.incoming.clock = lambda: now[0]
    try:
        out = engines.offered(engines.room(), (1, 2))
        into = engines.wanted(engines.room(), (1, 2), [3])
        now[0] = 29.0
        assert out.poll() is Poll.BOOTSTRAPPING and into.poll() is Poll.WAITING_FOR_INPUT
        now[0] = 31.0
        assert out.poll() is Poll.FAILED and out.failure == "no decode engine has asked for it within 30 s"
        until(into.poll, Poll.FAILED)
        assert into.failure == "its KV has not come within 30 s"
    finally:
        engines.outgoing.clock = engines.incoming.clock = time.monotonic
    until_empty(engines)


@pytest.mark.parametrize("num_tokens", [30, 7])
def test_the_last_window_and_one_state_travel_with_the_last_pages(mixed: Engines, num_tokens: int) -> None:
    """SGLang names their pages only at the end of a prompt. Full attention is sent before."""
    room, tokens = mixed.room(), tuple(range(num_tokens))
    full, window_begin = [5, 9, 2, 7][: -(-num_tokens // 8)], max(0, num_tokens - WINDOW_TOKENS)
    window = [11, 12, 13][: -(-num_tokens // 8) - window_begin // 8]
    for one in (*mixed.decode.k, *mixed.decode.v):
        one.fill_(-1.0)
    into = mixed.wanted(room, tokens, full, more_pages={GroupKind.WINDOW: window, GroupKind.STATE: [6]})
    out = mixed.offered(room, tokens)
    until(out.poll, Poll.WAITING_FOR_INPUT)
    pages = [3, 1, 8, 20, 21, 11, 12, 30][: -(-num_tokens // 4)]
    last = [9, 8, 7, 6][: len(pages) - window_begin // 4]
    fill(mixed.prefill, pages, 4, num_tokens, layer=0)
    fill(mixed.prefill, [0] * (len(pages) - len(last)) + last, 4, num_tokens, layer=1)
    mixed.prefill.k[2][14] = 77.0
    out.begin(len(pages), note_index=2)
    out.send(pages[:1], 4, None)
    out.send(pages[1:], num_tokens - 4, None, {GroupKind.WINDOW: last, GroupKind.STATE: [14]})
    until(into.poll, Poll.SUCCESS)
    until(out.poll, Poll.SUCCESS)
    decode = mixed.decode
    assert [float(decode.v[0][full[at // 8], at % 8, 1, 7]) for at in range(num_tokens)] == [at + 500 for at in range(num_tokens)]
    for token in range(window_begin // 8 * 8, num_tokens):  # also those before the window in its first page
        page = window[token // 8 - window_begin // 8]
        found = float(decode.k[1][page, token % 8, 0, 0])
        assert found == (token + 1000 if token >= window_begin else -1.0)
    assert bool((decode.k[2][6] == 77.0).all()) and bool((decode.k[2][:6] == -1.0).all())


def test_pages_that_the_prompt_does_not_have_fail_it(mixed: Engines) -> None:
    room, tokens = mixed.room(), tuple(range(20))
    into = mixed.wanted(room, tokens, [5, 9, 2], more_pages={GroupKind.WINDOW: [1, 2, 3, 4], GroupKind.STATE: [6]})
    assert into.poll() is Poll.FAILED and "SGLang has 4 pages of window_10 for 20 tokens" in into.failure
    until_empty(mixed)


def test_a_prompt_that_decode_has_whole_brings_its_state(mixed: Engines) -> None:
    room, tokens = mixed.room(), tuple(range(200, 216))
    into = mixed.wanted(room, tokens, [], prefix_tokens=16, more_pages={GroupKind.WINDOW: [], GroupKind.STATE: [9]})
    out = mixed.offered(room, tokens)
    until(out.poll, Poll.WAITING_FOR_INPUT)
    mixed.prefill.k[2][3] = 55.0
    out.begin(2, note_index=6)
    out.send([2, 4], 8, None, {GroupKind.WINDOW: [5, 6, 7], GroupKind.STATE: [3]})
    until(into.poll, Poll.SUCCESS)
    assert bool((mixed.decode.k[2][9] == 55.0).all())
    until(out.poll, Poll.SUCCESS)


def test_a_later_stage_waits_for_the_leaders_message(engines: Engines) -> None:
    """The first stage decides that a prompt is wanted. Others may hear of that before the message of the leader has come."""
    room, tokens = engines.room(), tuple(range(300, 320))
    out = engines.offered(room, tokens)
    into = engines.wanted(room, tokens, [14], prefix_tokens=16)
    assert out.wait_until_wanted() == 16
    out.fail()
    until(into.poll, Poll.FAILED)
    now = iter(range(0, 1000, 2))
    engines.outgoing.clock = lambda: float(next(now))
    try:
        late = engines.offered(engines.room(), tokens)
        late.wait_until_wanted()
        assert late.poll() is Poll.FAILED and "the leader of this engine has not reported the prompt within 5 s" in late.failure
    finally:
        engines.outgoing.clock = time.monotonic
    until_empty(engines)


def until_empty(engines: Engines) -> None:
    """Nothing is kept of any prompt, on either side."""
    deadline = time.monotonic() + WAIT_S
    while len(engines.outgoing) or len(engines.incoming):
        engines.outgoing.look()
        engines.incoming.look()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_rows_of_metadata() -> None:
    rows = [b"first", b"", b"x" * 64]
    assert unpack_note(pack_note(rows), [5, 0, 64]) == rows
    for note, sizes in ((pack_note(rows), [5, 0]), (pack_note(rows)[:-1], [5, 0, 64]), (b"", [5]), (b"\xff" * 9, [5])):
        with pytest.raises(IntegrityError, match="rows of"):
            unpack_note(note, sizes)
