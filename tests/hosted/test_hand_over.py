"""The KV of prompts from an engine that schedules by itself into another one, both with a kvferry that they host."""

from __future__ import annotations

from collections.abc import Callable
from urllib.request import urlopen

from kvferry.engines.hosted import SOURCE, TARGET
from tests.hosted.conftest import Start
from tests.hosted.instances import FROM, PAGES, PROMPT, TO, Instance, prompt_of, target, wait_for

Pair = Callable[..., tuple[Instance, Instance]]


def test_a_prompt_that_is_fetched_once_it_is_computed(pair: Pair) -> None:
    source, decode = pair({"tp_size": 2})
    source.sends("a", "t", note=b"what one engine tells the other")
    decode.leader.want("b", "t", source.leader.address, PROMPT, needs_note=True)
    decode.wait_until_ready("b")
    decode.leader.bind("b", [TO])
    assert decode.settled("b").note == b"what one engine tells the other"
    decode.assert_has(TO, PROMPT)
    assert source.freed("a").failure == ""


def test_many_prompts_at_once(pair: Pair) -> None:
    source, decode = pair({"tp_size": 2, "page_size": 8}, {"page_size": 16, "ring.capacity_bytes": 1 << 16})
    prompts = {f"p{number}": prompt_of(3 + 5 * number, number) for number in range(8)}
    taken_from, taken_to, free_from, free_to = {}, {}, list(range(PAGES)), list(range(PAGES))
    for name, prompt in prompts.items():
        taken_from[name] = [free_from.pop() for _ in range(-(-len(prompt) // 8))]
        taken_to[name] = [free_to.pop(0) for _ in range(-(-len(prompt) // 16))]
        decode.leader.want(name, name, source.leader.address, prompt)
    for name, prompt in reversed(prompts.items()):
        source.leader.offer(name, name, prompt)
        source.leader.begin(name)
        source.compute(name, taken_from[name], prompt, 0, len(prompt))
        source.finish(name)
    for name in prompts:
        decode.wait_until_ready(name)
        decode.leader.bind(name, [taken_to[name]])
    for name, prompt in prompts.items():
        assert decode.settled(name).failure == ""
        decode.assert_has(taken_to[name], prompt)
        assert source.freed(name).failure == ""
    source.assert_idle()
    decode.assert_idle()


def test_an_instance_that_is_both_sides(start: Start) -> None:
    source = start(SOURCE)
    both = start(SOURCE | TARGET, settings={"peers.prefill_nodes": (source.leader.address,)})
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
        types = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types)), "metrics of both sides stand together, as the format wants it"
        for outcome in ('outcome="sent",role="prefill"', 'outcome="done",role="decode"'):
            assert f"kvferry_requests_total{{{outcome}}} 1.0" in page
    finally:
        last.close()
