"""The KV of prompts from an engine that schedules by itself into another one, both with a kvferry that they host."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.request import urlopen

import pytest

from kvferry.engines.connector import DECODE, PREFILL
from tests.connector.conftest import Pair, Start
from tests.connector.instances import FROM, PROMPT, TO, hand_over, target, wait_for
from transfer.copy.copier import CopyPlan
from transfer.copy.torch_copy import TorchCopier
from transfer.layout import WireBuffer
from transfer.pool.kv_pool import PagedKVPool


def test_an_instance_that_is_both_sides(start: Start) -> None:
    source = start(PREFILL)
    both = start(PREFILL | DECODE, settings={"peers.prefill_nodes": (source.leader.address,)})
    wait_for(both.joined, "joined")
    last = target(both)
    try:
        source.sends("a", "t")
        both.fetches("b", "t", source)
        assert both.settled("b").failure == ""
        both.sends("c", "u", pages=TO)
        last.fetches("d", "u", both, pages=FROM)
        assert last.settled("d").failure == ""
        last.assert_has(FROM, PROMPT)
        assert both.freed("c").failure == ""
        page = urlopen(f"http://{both.leader.http_address}/metrics", timeout=10).read().decode()
        for outcome in ('outcome="sent",role="prefill"', 'outcome="done",role="decode"'):
            assert f"kvferry_requests_total{{{outcome}}} 1.0" in page
    finally:
        last.close()


def test_both_sides_copy_with_the_kernels_that_are_set(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[PagedKVPool] = []
    plan_of = TorchCopier.plan

    def plan(copier: TorchCopier, buffers: Sequence[WireBuffer]) -> CopyPlan:
        copied.append(copier.pool)
        return plan_of(copier, buffers)

    monkeypatch.setattr(TorchCopier, "plan", plan)
    source, decode = pair({"settings": {"kernels": "torch"}}, {"kernels": "torch"})
    hand_over(source, decode, "a")
    assert {id(pool) for pool in copied} == {id(one.pools[0].part_of(0)) for one in (source, decode)}
