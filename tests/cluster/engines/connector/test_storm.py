"""Hundreds of prompts between two engines, half of them given up or taken back at some moment, through a ring that is too small.

Pages are overwritten the moment that kvferry says that nothing reads, or writes, them any more: every whole prompt is bit-exact,
no copy reads a page after that, and nothing is left. Both engines have fewer pages than their prompts want.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.connector.instances import LAYERS, PAGES, Instance, prompt_of
from transfer.connector import bound_prompts, incoming
from transfer.connector.bound_prompts import PromptState
from transfer.connector.incoming_rank import Settled
from transfer.connector.outgoing_rank import Free, GivenUp
from transfer.copy.piece_copier import PieceCopy

pytestmark = pytest.mark.timeout(400)

Pair = Callable[..., tuple[Instance, Instance]]
NUM_PROMPTS = 300
AT_ONCE = 14
MAX_PAUSES = 3
YIELDED = "others need its pages here"
WITHIN_S = 300.0


@dataclass(slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt on both sides.

    Args:
        fate: What happens to it: "", "withdraw", "cancel" or "pause", which can happen thrice.
        at_token: Tokens that are computed when it does.
    """

    name: str
    tokens: tuple[int, ...]
    fate: str
    at_token: int
    wants_early: bool
    begun: bool = False
    from_pages: list[int] = field(default_factory=list)
    to_pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_wanted: bool = False
    is_finished: bool = False
    is_free: bool = False
    is_settled: bool = False
    failure: str | None = None
    withdraw_s: float | None = None
    num_pauses: int = 0


class Storm:
    """Both engines' schedulers, in one loop."""

    def __init__(self, source: Instance, decode: Instance, watched: Watched, *, seed: int) -> None:
        self.source, self.decode = source, decode
        self.watched = watched
        self.random = random.Random(seed)
        self.waiting = [self._prompt(index) for index in range(NUM_PROMPTS)]
        self.all = {prompt.name: prompt for prompt in self.waiting}
        self.living: list[Prompt] = []
        self.from_free, self.to_free = list(range(PAGES)), list(range(PAGES))
        self.pauses = 0

    def _prompt(self, index: int) -> Prompt:
        num_tokens = self.random.randint(10, 110)
        fate = self.random.choice(["withdraw", "cancel", "pause"]) if self.random.random() < 0.5 else ""
        return Prompt(
            name=f"p{index}",
            tokens=prompt_of(num_tokens, seed=index),
            fate=fate,
            at_token=self.random.randint(0, num_tokens),
            wants_early=self.random.random() < 0.6,
        )

    def run(self) -> None:
        deadline = time.monotonic() + WITHIN_S
        while self.waiting or self.living:
            assert time.monotonic() < deadline, [prompt for prompt in self.living]
            while self.waiting and len(self.living) < AT_ONCE:
                self._offer(self.waiting.pop(0))
            for prompt in self.random.sample(self.living, len(self.living)):
                self._step_source(prompt)
                self._step_decode(prompt)
            self._news()
            self.living = [prompt for prompt in self.living if not (prompt.is_free and prompt.is_settled)]
            time.sleep(0.001)

    # The prefill engine

    def _offer(self, prompt: Prompt) -> None:
        if prompt.wants_early:
            self._want(prompt)
        self.source.leader.offer(prompt.name, prompt.name, prompt.tokens)
        self.living.append(prompt)

    def _step_source(self, prompt: Prompt) -> None:
        if prompt.is_finished:
            if prompt.withdraw_s is not None and time.monotonic() >= prompt.withdraw_s:
                prompt.withdraw_s = None
                self.source.leader.withdraw(prompt.name, "its router says that nobody wants it")
            return
        if not prompt.from_pages and not self._begin(prompt):
            return
        if prompt.fate == "pause" and prompt.num_pauses < MAX_PAUSES:
            if self.watched.reads(prompt.from_pages) or self.random.random() < 0.02:
                self._pause(prompt)
                return
            if prompt.num_computed >= prompt.at_token and not prompt.is_settled:
                return  # not before it is being sent
        if self.random.random() < 0.4:
            return  # a step takes the engine some time, in which what was computed before is sent
        end = min(len(prompt.tokens), prompt.num_computed + self.random.randint(8, 60))
        if prompt.fate == "withdraw":
            end = min(end, max(prompt.at_token, prompt.num_computed + 1))
        self.source.compute(prompt.name, prompt.from_pages, prompt.tokens, prompt.num_computed, end)
        prompt.num_computed = end
        if prompt.fate == "withdraw" and end >= prompt.at_token:
            prompt.fate = "withdraw, done"
            self.source.leader.withdraw(prompt.name, "withdrawn")
            self._finish_ranks(prompt)
        elif end == len(prompt.tokens):
            self._finish_ranks(prompt)
            self.source.leader.finish(prompt.name)

    def _begin(self, prompt: Prompt) -> bool:
        count = -(-len(prompt.tokens) // self.source.page_size)
        if len(self.from_free) < count:
            return False
        prompt.from_pages = [self.from_free.pop() for _ in range(count)]
        self.source.leader.begin(prompt.name)
        return True

    def _finish_ranks(self, prompt: Prompt) -> None:
        prompt.is_finished = True
        for rank in self.source.ranks:
            rank.finish(prompt.name)
        if prompt.fate == "cancel, done":
            prompt.withdraw_s = time.monotonic() + self.random.random() * 0.3

    def _pause(self, prompt: Prompt) -> None:
        prompt.num_pauses += 1
        self.pauses += 1
        self.source.leader.pause(prompt.name)
        for rank in self.source.ranks:
            rank.pause([prompt.name], "preempted")
        self._take_back(prompt)
        prompt.num_computed = 0

    def _take_back(self, prompt: Prompt) -> None:
        spoil(self.source, prompt.from_pages)
        self.from_free.extend(prompt.from_pages)
        prompt.from_pages = []

    # The decode engine

    def _want(self, prompt: Prompt) -> None:
        prompt.is_wanted = True
        self.decode.leader.want(prompt.name, prompt.name, self.source.leader.address, prompt.tokens)

    def _step_decode(self, prompt: Prompt) -> None:
        if prompt.is_settled:
            return
        if not prompt.is_wanted:
            if prompt.is_finished or self.random.random() < 0.1:
                self._want(prompt)
            return
        if prompt.fate == "cancel" and prompt.num_computed >= prompt.at_token:
            prompt.fate = "cancel, done"
            self.decode.leader.cancel(prompt.name, "cancelled")
            if prompt.is_finished:
                prompt.withdraw_s = time.monotonic() + self.random.random() * 0.3
            if not prompt.to_pages:
                prompt.is_settled, prompt.failure = True, "cancelled"
            return
        if prompt.to_pages:
            return
        view = self.decode.leader.view(prompt.name)
        assert view is not None, prompt
        if view.state is PromptState.FAILED:
            prompt.is_settled, prompt.failure = True, view.failure
            self.decode.leader.cancel(prompt.name, "computed here")
        elif view.state is PromptState.READY:
            count = -(-len(prompt.tokens) // self.decode.page_size)
            if len(self.to_free) >= count:
                prompt.to_pages = [self.to_free.pop() for _ in range(count)]
                assert_spoilt(self.decode, prompt.to_pages)
                self.decode.leader.bind(prompt.name, [prompt.to_pages])
            else:
                self.decode.leader.report_page_shortage(prompt.name)

    # Both

    def _news(self) -> None:
        for rank in self.source.ranks:
            for news in rank.poll_events():
                prompt = self.all[news.name]
                if isinstance(news, Free) and not prompt.is_free:  # the first rank says it of all of them
                    assert prompt.is_finished, prompt
                    prompt.is_free = True
                    self._take_back(prompt)
                elif isinstance(news, GivenUp) and not prompt.is_finished:
                    assert prompt.fate != "", (prompt, news)
                    self._finish_ranks(prompt)
        for rank in self.decode.ranks:
            for news in rank.poll_events():
                assert isinstance(news, Settled)
                prompt = self.all[news.name]
                assert not prompt.is_settled and prompt.to_pages, (prompt, news)
                prompt.is_settled, prompt.failure = True, news.failure
                if not news.failure:
                    self.decode.assert_has(prompt.to_pages, prompt.tokens)
                spoil(self.decode, prompt.to_pages)
                self.to_free.extend(prompt.to_pages)  # the next to be taken


def spoil(instance: Instance, pages: Sequence[int]) -> None:
    """Nobody's from now on."""
    for pool in instance.pools:
        for layer in range(LAYERS):
            for is_v in (False, True):
                pool.buffer(layer, is_v=is_v)[list(pages)] = float("nan")


def assert_spoilt(instance: Instance, pages: Sequence[int]) -> None:
    """Nothing was written there since."""
    for pool in instance.pools:
        for layer in range(LAYERS):
            for is_v in (False, True):
                assert pool.buffer(layer, is_v=is_v)[list(pages)].isnan().all()


class Watched:
    """Delay each copy by some milliseconds, as an engine's event does, and check the bytes that it reads.

    Pages that are nobody's are full of NaN, and no KV is one: a gather that finds one has read pages that it was to leave alone.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        chance = random.Random(seed)
        gather, scatter = PieceCopy.gather, PieceCopy.scatter
        self.num_gathers = 0
        self.late: list[PieceCopy] = []
        self._under_way: dict[int, set[int]] = {}  # pages that gathers read, by the piece's identity

        def slow_gather(piece: PieceCopy, out: Any, digest: Any = None) -> None:
            self._under_way[id(piece)] = {page for table in piece.tables for page in table.tolist()}
            time.sleep(chance.random() * 0.006)
            gather(piece, out, digest)
            del self._under_way[id(piece)]
            self.num_gathers += 1
            if out[: piece.num_wire_bytes].view(torch.float32).isnan().any():
                self.late.append(piece)

        def slow_scatter(piece: PieceCopy, source: Any, digest: Any = None) -> None:
            time.sleep(chance.random() * 0.006)
            scatter(piece, source, digest)

        monkeypatch.setattr(PieceCopy, "gather", slow_gather)
        monkeypatch.setattr(PieceCopy, "scatter", slow_scatter)

    def reads(self, pages: Sequence[int]) -> bool:
        """Whether a gather of some of these pages is under way."""
        return any(not read.isdisjoint(pages) for read in list(self._under_way.values()))


@pytest.mark.parametrize("seed", [1])
def test_a_storm(pair: Pair, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, seed)
    monkeypatch.setattr(bound_prompts, "YIELD_AFTER_S", 0.5)
    monkeypatch.setattr(incoming, "REASON_GRACE_S", 30.0)  # however slow the machine: prefill's reason counts
    settings = {"ring.capacity_bytes": 1 << 16, "limits.prefill_retries": 0}  # a preemption is no retry
    source, decode = pair({"tp_size": 2, "settings": settings}, settings)
    for instance in (source, decode):
        spoil(instance, range(PAGES))
    storm = Storm(source, decode, watched, seed=seed)
    storm.run()
    ended = Counter((prompt.fate, "whole" if not prompt.failure else "failed") for prompt in storm.all.values())
    kept = [prompt for prompt in storm.all.values() if prompt.fate in ("", "pause")]
    failed = {prompt.name: prompt.failure for prompt in kept if prompt.failure}
    yielded = {prompt.name for prompt in kept if prompt.num_pauses and YIELDED in (prompt.failure or "")}
    assert failed.keys() == yielded, (ended, failed)
    assert ended["pause", "whole"] > len(yielded), ended
    assert storm.pauses > 20 and ended["withdraw, done", "failed"] > 20 and ended["cancel, done", "failed"] > 20, ended
    assert watched.late == [] and watched.num_gathers > NUM_PROMPTS
    assert_spoilt(decode, range(PAGES))
    assert sorted(storm.from_free) == sorted(storm.to_free) == list(range(PAGES))
    source.assert_idle()
    decode.assert_idle()
    assert source.leader.num_joined == decode.leader.num_joined == 1, "no link was lost in it"
    for rank in source.ranks + decode.ranks:
        rank.poll_events()
