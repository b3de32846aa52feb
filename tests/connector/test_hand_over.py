"""The KV of prompts from an engine that schedules by itself into another one, both with a kvferry that they host."""

from __future__ import annotations

from urllib.request import urlopen

from kvferry.engines.connector import DECODE, PREFILL
from tests.connector.conftest import Start
from tests.connector.instances import FROM, PROMPT, TO, target, wait_for


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
