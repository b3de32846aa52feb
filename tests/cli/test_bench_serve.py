"""Arithmetic of `kvferry bench serve`: arrivals, lengths, traces, percentiles, goodput; and what it says of bad input."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvferry.__main__ import app
from kvferry.bench_serve import generator
from kvferry.bench_serve.generator import OpenLoop
from kvferry.bench_serve.options import shape_of
from kvferry.bench_serve.summary import Lateness, Moved, Objectives, Record, Spread, percentile, summarise, sustained_rate
from kvferry.bench_serve.workload import (
    FIRST_ID,
    ArrivalKind,
    Choice,
    Lengths,
    Planned,
    Prompts,
    Shape,
    gaps_s,
    plan_requests,
    read_trace,
)
from kvferry.cli.node_client import NodeClient
from node_runtime import exit_codes
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.errors import ConfigError, ResourceExhausted
from transfer.pb import kvferry_pb2 as pb

ON_TIME = Lateness(sends_s=Spread(), loop_s=Spread(), cpu_share=0.0, limit_s=0.1)


def shape(prompt: str = "100", output: str = "10", *, shared: float = 0.0, prefixes: int = 1) -> Shape:
    return shape_of(prompt, output, shared_prefix=shared, num_prefixes=prefixes)


# Arrivals


@pytest.mark.parametrize(("kind", "variation"), [("poisson", 1.0), ("uniform", 1 / math.sqrt(3)), ("constant", 0.0)])
def test_gaps_of_every_kind_have_the_rate(kind: str, variation: float) -> None:
    gaps = gaps_s(ArrivalKind(kind), rate=4.0, number=20_000, chance=random.Random(2))
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(gaps) * 4.0 == pytest.approx(variation, abs=0.03)


def test_a_seed_fixes_everything_and_another_one_changes_it() -> None:
    asked = dict(kind=ArrivalKind.POISSON, rate=5.0, number=50, num_warm_up=3)
    drawn = shape("lognormal:200:0.7:900", "uniform:4:30")
    assert plan_requests(drawn, seed=1, **asked) == plan_requests(drawn, seed=1, **asked)  # type: ignore[arg-type]
    assert plan_requests(drawn, seed=1, **asked) != plan_requests(drawn, seed=2, **asked)  # type: ignore[arg-type]


# Lengths, traces, prompts


@pytest.mark.parametrize(
    ("text", "least", "most", "median"),
    [("7", 7, 7, 7), ("fixed:9", 9, 9, 9), ("uniform:10:20", 10, 20, 15), ("lognormal:300:0.5:800", 1, 800, 300)],
)
def test_lengths_are_drawn_as_they_are_named(text: str, least: int, most: int, median: int) -> None:
    lengths, chance = Lengths.parse("--x", text), random.Random(4)
    drawn = [lengths.draw(chance) for _ in range(4000)]
    assert min(drawn) >= least
    assert max(drawn) <= most
    assert statistics.median(drawn) == pytest.approx(median, rel=0.05)
    assert Lengths.parse("--x", lengths.text) == lengths


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "uniform:9:3",
        "zipf:3",
    ],
)
def test_other_lengths_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--prompt-tokens is"):
        Lengths.parse("--prompt-tokens", text)


def test_a_trace_is_replayed_and_can_be_stretched(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp_s": 14.0, "prompt_tokens": 30, "output_tokens": 3}\n'
        '{"timestamp": 10000, "input_length": 10, "output_length": 1}\n\n'
        '{"timestamp_s": 12.0, "prompt_tokens": 20, "output_tokens": 2}\n'
    )
    planned = read_trace(file, rate=None, num_warm_up=1)
    assert planned == (
        Planned(at_s=0.0, prompt_tokens=10, output_tokens=1, is_warm_up=True),
        Planned(at_s=2.0, prompt_tokens=20, output_tokens=2),
        Planned(at_s=4.0, prompt_tokens=30, output_tokens=3),
    )
    assert [one.at_s for one in read_trace(file, rate=5.0, num_warm_up=0)] == pytest.approx([0.0, 0.2, 0.4])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is no JSON object"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "line 2 has no timestamp_s"),
        ('{"timestamp_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 2 has prompt_tokens 0"),
        ('{"timestamp_s": true, "prompt_tokens": 4, "output_tokens": 1}', "line 2 has no timestamp_s"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=says):
        read_trace(file, rate=None, num_warm_up=0)


def test_prompts_share_as_much_as_is_asked_for_and_no_more() -> None:
    prompts = Prompts(vocab_size=500, shape=shape(shared=0.75, prefixes=2), longest=100, seed=9)
    made = [prompts.of("1", index, 100) for index in range(40)]
    beginnings = {tuple(one[:75]) for one in made}
    assert len(beginnings) == 2
    assert len({tuple(one[75:]) for one in made}) == 40
    assert all(FIRST_ID <= token < 500 for one in made for token in one)
    assert prompts.of("1", 7, 100) == made[7]
    assert prompts.of("2", 7, 100) != made[7]
    assert tuple(prompts.of("2", 7, 60)[:45]) in {one[:45] for one in beginnings}
    alone = Prompts(vocab_size=500, shape=shape(), longest=100, seed=9)
    assert len({tuple(alone.of("1", index, 5)) for index in range(40)}) == 40


# Percentiles, goodput


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 1))
def test_percentiles_are_those_of_numpy(samples: list[float], share: float) -> None:
    assert percentile(sorted(samples), share) == pytest.approx(float(numpy.quantile(samples, share)), rel=1e-9, abs=1e-9)


def record(
    index: int, *, due_s: float, first_s: float, num_tokens: int = 5, step_s: float = 0.01, is_warm_up: bool = False
) -> Record:
    """Sent 1 ms late, served."""
    return Record(
        index=index,
        target=f"decode-{index % 2}",
        due_s=due_s,
        prompt_tokens=10,
        is_warm_up=is_warm_up,
        sent_s=due_s + 0.001,
        token_s=[due_s + first_s + step_s * n for n in range(num_tokens)],
        num_tokens=num_tokens,
        ended_s=due_s + first_s + step_s * num_tokens,
        moved=Moved(
            node_ttft_s=first_s, transfer_s=first_s / 2, exposed_s=first_s / 10, num_bytes=1000, writes=3, resends=0,
            prefill_node="p", retries=0, cached_tokens=0,
        ),
    )  # fmt: skip


def test_goodput_counts_what_met_both_objectives_over_the_window() -> None:
    records = [
        record(0, due_s=0.0, first_s=9.0, is_warm_up=True),
        record(1, due_s=1.0, first_s=0.1),
        record(2, due_s=2.0, first_s=0.3),  # too late a first token
        record(3, due_s=3.0, first_s=0.1, step_s=0.05),  # too slow afterwards
        record(4, due_s=4.0, first_s=0.1, num_tokens=1),  # nothing afterwards
        Record(
            index=5, target="decode-1", due_s=5.0, prompt_tokens=10, sent_s=5.0, ended_s=5.5, failure="UNAVAILABLE", reason="x"
        ),
        Record(index=6, target="decode-0", due_s=5.5, prompt_tokens=10, sent_s=5.5),  # cut off
    ]
    found = summarise(records, rate=1.0, window_s=6.0, objectives=Objectives(ttft_s=0.2, tpot_s=0.02), lateness=ON_TIME)
    assert (found.requests, found.served, found.failed, found.good) == (6, 4, 1, 2)
    assert found.goodput == pytest.approx(2 / 6)
    assert found.attainment == pytest.approx(2 / 6)
    assert found.failures == {"UNAVAILABLE": 1}
    assert found.reasons == {"UNAVAILABLE": "x"}
    assert found.ttft_s.samples == 4
    assert found.ttft_s.most == pytest.approx(0.3)  # from when it was due
    assert found.tpot_s.samples == 3
    assert found.tpot_s.most == pytest.approx(0.05)
    assert found.itl_s.samples == 12
    assert found.exposed_share.p50 == pytest.approx(0.1)
    assert found.transfer_share.p50 == pytest.approx(0.5)
    assert found.throughput == pytest.approx(4 / 3.1)  # from the first one's due time to the last token
    assert found.bytes_moved == 4000
    assert found.decode_nodes == {"decode-1": 2, "decode-0": 2}
    assert found.most_in_flight == 2
    anything = summarise(records, rate=1.0, window_s=6.0, objectives=Objectives(), lateness=ON_TIME)
    assert anything.good == 4


def test_the_sustained_rate_is_the_highest_with_nine_in_ten() -> None:
    fast, slow = [record(n, due_s=n, first_s=0.1) for n in range(10)], [record(n, due_s=n, first_s=1.0) for n in range(10)]
    limits = Objectives(ttft_s=0.2)
    mixes = {1.0: fast, 2.0: [*fast[:9], slow[9]], 3.0: [*fast[:8], *slow[8:]]}
    found = [summarise(mix, rate=rate, window_s=10 / rate, objectives=limits, lateness=ON_TIME) for rate, mix in mixes.items()]
    assert sustained_rate(found) == pytest.approx(2.0)
    assert sustained_rate(found[2:]) is None


# The generator


class SlowNode:
    """Answers after a while; or refuses. Stands where a `NodeClient` stands."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error
        self.num_running = self.most_running = 0

    async def generate(
        self, request: pb.GenerateRequest, *, accept_timeout_s: float, timeout_s: float
    ) -> AsyncGenerator[pb.GenerateEvent, None]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            for token in (5, 6):
                yield pb.GenerateEvent(tokens=pb.GeneratedTokens(token_ids=[token]))
            yield pb.GenerateEvent(done=pb.GenerateDone(prefill_node="p", ttft_s=self.seconds))
        finally:
            self.num_running -= 1


RunLoop = Callable[..., OpenLoop]


@pytest.fixture
def run_loop(monkeypatch: pytest.MonkeyPatch) -> RunLoop:
    """Runs a generator in virtual time; the loop stands still for 300 ms from `blocked_at_s` on."""

    def run(
        nodes: dict[str, SlowNode],
        planned: list[Planned],
        *,
        choice: Choice = Choice.ROUND_ROBIN,
        blocked_at_s: float | None = None,
    ) -> OpenLoop:
        made = OpenLoop(cast("dict[str, NodeClient]", nodes), choice=choice, timeout_s=9.0, max_lateness_s=0.1)

        async def main(loop: VirtualTimeLoop) -> None:
            monkeypatch.setattr(generator, "time", SimpleNamespace(monotonic=loop.time, process_time=loop.time))
            if blocked_at_s is not None:
                loop.call_later(blocked_at_s, lambda: setattr(loop, "now_s", loop.now_s + 0.3))
            await made.run(planned, lambda index, one: pb.GenerateRequest(max_new_tokens=one.output_tokens))

        run_in_virtual_time(main, monkeypatch)
        return made

    return run


def every(seconds: float, number: int) -> list[Planned]:
    return [Planned(at_s=index * seconds, prompt_tokens=1, output_tokens=2) for index in range(number)]


def test_arrivals_wait_for_no_answer(run_loop: RunLoop) -> None:
    node = SlowNode(3.0)
    loop = run_loop({"a": node}, every(0.01, 30))
    assert node.most_running == 30  # a loop that waited would never have had two
    assert all(one.is_served and one.ttft_s == pytest.approx(3.0) for one in loop.records)
    assert max(one.sent_s or 0.0 for one in loop.records) == pytest.approx(0.29)
    assert loop.lateness().sends_s.samples == 30


def test_a_blocked_generator_says_that_it_was_late(run_loop: RunLoop) -> None:
    loop = run_loop({"a": SlowNode(0.0)}, every(0.02, 20), blocked_at_s=0.1)
    lateness = loop.lateness()
    assert lateness.is_late
    assert lateness.sends_s.most > 0.2
    assert lateness.loop_s.most > 0.2
    assert max(one.ttft_s for one in loop.records) > 0.2  # counted from when it was due: the wait is not hidden


def test_failures_are_counted_by_status(run_loop: RunLoop) -> None:
    loop = run_loop({"a": SlowNode(0.0, ResourceExhausted("decode queue is full"))}, every(0.001, 3))
    assert {(one.failure, one.reason) for one in loop.records} == {("RESOURCE_EXHAUSTED", "decode queue is full")}


# The command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no --target"),
        (("--target", "127.0.0.1:1", "--target", "127.0.0.1:1", "--rate", "1"), "--target 127.0.0.1:1 appears twice"),
        (("--target", "127.0.0.1:1", "--rate", "1,x", "--requests", "1"), "--rate has 'x'"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--arrivals", "gamma"), "Invalid value for '--arrivals'"),
        (("--target", "127.0.0.1:1", "--trace", "/nowhere", "--insecure"), "--trace is /nowhere; it cannot be read"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--insecure", "--plot", "a.svg"), "--plot is a.svg"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_bad_input(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert says in result.output
    assert result.exit_code == exit_codes.BAD_INPUT, result.output
    assert "Traceback" not in result.output


def test_the_report_is_json() -> None:
    """Also where nothing was served, and with every value that is not JSON's own."""
    summary = summarise([record(0, due_s=0.0, first_s=0.1)], rate=1.0, window_s=1.0, objectives=Objectives(), lateness=ON_TIME)
    content: dict[str, Any] = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert content["ttft_s"]["p50"] == pytest.approx(0.1)
    assert content["is_late"] is False
    json.dumps(summarise([], rate=1.0, window_s=1.0, objectives=Objectives(), lateness=ON_TIME).to_json(), allow_nan=False)
