"""Arithmetic of `kvferry bench serve`: arrivals, lengths, traces, percentiles, goodput; and what it says of bad input."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvferry import exit_codes
from kvferry.__main__ import app
from kvferry.bench_serve import generator
from kvferry.bench_serve.arrivals import ArrivalKind, gaps_s
from kvferry.bench_serve.generator import Choice, OpenLoop
from kvferry.bench_serve.lengths import Lengths
from kvferry.bench_serve.options import LoadOptions, shape_of
from kvferry.bench_serve.records import Moved, Record
from kvferry.bench_serve.report import LoadReport, lines_of, print_report
from kvferry.bench_serve.summary import Lateness, Objectives, Spread, most_at_once, percentile, summarise, sustained_rate
from kvferry.bench_serve.workload import FIRST_ID, Planned, Prompts, Shape, plan_requests, read_trace
from kvferry.node_client import NodeClient
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.errors import ConfigError, StagingError
from transfer.pb import kvferry_pb2 as pb

ON_TIME = Lateness(sends_s=Spread(), loop_s=Spread(), cpu_share=0.0, limit_s=0.1)


def shape(prompt: str = "100", output: str = "10", *, shared: float = 0.0, prefixes: int = 1) -> Shape:
    return shape_of(prompt, output, shared_prefix=shared, num_prefixes=prefixes)


# Arrivals


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov and Smirnov: of 20,000 gaps the distance to the exponential distribution is below the 1 % bound."""
    number, rate = 20_000, 7.0
    gaps = sorted(gaps_s(ArrivalKind.POISSON, rate=rate, number=number, chance=random.Random(5)))
    expected = [1 - math.exp(-rate * gap) for gap in gaps]
    distance = max(max((index + 1) / number - one, one - index / number) for index, one in enumerate(expected))
    assert distance < 1.63 / math.sqrt(number)
    assert statistics.fmean(gaps) == pytest.approx(1 / rate, rel=0.02)


def test_numbers_in_equal_windows_are_poisson() -> None:
    """Their variance is their mean, which it would not be if gaps were right and not independent."""
    planned = plan_requests(shape(), kind=ArrivalKind.POISSON, rate=50, number=50_000, num_warm_up=0, seed=1)
    windows = numpy.histogram([one.at_s for one in planned], bins=1000, range=(0, 1000))[0][:990]
    assert windows.var() / windows.mean() == pytest.approx(1.0, abs=0.15)


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


def test_a_duration_holds_the_arrivals_that_come_within_it() -> None:
    options = LoadOptions(targets=("h:1",), rates=(20.0,), shape=shape(), duration_s=100.0, num_warm_up=10, seed=3)
    (run,) = options.runs()
    warm = [one for one in run.planned if one.is_warm_up]
    counted = [one.at_s - warm[-1].at_s for one in run.planned if not one.is_warm_up]
    assert len(warm) == 10
    assert run.window_s() == 100.0
    assert max(counted) <= 100.0
    assert len(counted) == pytest.approx(2000, abs=6 * math.sqrt(2000))
    longer = LoadOptions(targets=("h:1",), rates=(20.0,), shape=shape(), num_requests=len(counted) + 1, num_warm_up=10, seed=3)
    assert longer.runs()[0].planned[-1].at_s - warm[-1].at_s > 100.0  # and not one more would have


def test_a_run_that_is_repeated_is_another_draw() -> None:
    """What keeps KV of prompts would serve the second of two equal runs from what the first has left."""
    asked = dict(targets=("h:1",), shape=shape("uniform:50:90"), num_requests=20)
    once, again, other = LoadOptions(rates=(2.0, 2.0, 3.0), seed=3, **asked).runs()  # type: ignore[arg-type]
    assert len({once.name, again.name, other.name}) == 3, "prompts go by it"
    assert once.planned != again.planned and once.rate == again.rate
    assert once == LoadOptions(rates=(2.0,), seed=3, **asked).runs()[0], "the first is as it would be alone"  # type: ignore[arg-type]
    assert len({LoadOptions(rates=(2.0,), **asked).seed for _ in range(8)}) > 1  # type: ignore[arg-type]


def test_a_trace_that_is_run_twice_has_other_prompts(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f'{{"timestamp_s": {n}, "prompt_tokens": 9, "output_tokens": 2}}\n' for n in range(4)))
    runs = LoadOptions(targets=("h:1",), rates=(2.0, 2.0), shape=shape(), trace=file).runs()
    assert len({run.name for run in runs}) == 2 and runs[0].planned == runs[1].planned


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
        "",
        "0",
        "-3",
        "1.5",
        "fixed:",
        "uniform:5",
        "uniform:9:3",
        "lognormal:100",
        "lognormal:100:-1",
        "lognormal:100:nan",
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
        ("[1]", "line 2 is no JSON object"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "line 2 has no timestamp_s"),
        ('{"timestamp_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "line 2 has prompt_tokens 0"),
        ('{"timestamp_s": 1, "prompt_tokens": 4}', "line 2 has output_tokens None"),
        ('{"timestamp_s": true, "prompt_tokens": 4, "output_tokens": 1}', "line 2 has no timestamp_s"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=says):
        read_trace(file, rate=None, num_warm_up=0)


@pytest.mark.parametrize("rate", [None, 3.0])
@pytest.mark.parametrize(("times", "num_warm_up"), [((5, 5, 5), 0), ((7,), 0), ((1, 2, 2), 2)])
def test_a_trace_of_one_moment_has_no_rate(tmp_path: Path, times: tuple[int, ...], num_warm_up: int, rate: float | None) -> None:
    """Its window would be nothing, and the load that was offered billions a second."""
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(f'{{"timestamp_s": {at}, "prompt_tokens": 9, "output_tokens": 2}}\n' for at in times))
    with pytest.raises(ConfigError, match=r"all come at one moment, [257] s, and so have no rate; their timestamps must differ"):
        read_trace(file, rate=rate, num_warm_up=num_warm_up)


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


def test_a_spread_of_nothing_is_zero() -> None:
    assert Spread.of([]) == Spread()
    assert Spread.of([2.0]).p99 == 2.0


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


def test_most_at_once_lets_go_before_it_takes() -> None:
    def lasting(begin_s: float, end_s: float) -> Record:
        return Record(index=0, target="t", due_s=begin_s, prompt_tokens=1, sent_s=begin_s, ended_s=end_s)

    assert most_at_once([lasting(0, 2), lasting(1, 3), lasting(2, 4)]) == 2


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


def test_turns_and_least_outstanding(run_loop: RunLoop) -> None:
    turns = run_loop({"a": SlowNode(0.3), "b": SlowNode(0.0)}, every(0.01, 20))
    assert [one.target for one in turns.records] == ["a", "b"] * 10
    least = run_loop({"a": SlowNode(0.3), "b": SlowNode(0.0)}, every(0.01, 20), choice=Choice.LEAST_OUTSTANDING)
    assert sum(one.target == "a" for one in least.records) <= 4
    light = run_loop({"a": SlowNode(0.0), "b": SlowNode(0.0)}, every(0.01, 20), choice=Choice.LEAST_OUTSTANDING)
    assert {one.target for one in light.records} == {"a", "b"}


def test_failures_are_counted_by_status(run_loop: RunLoop) -> None:
    loop = run_loop({"a": SlowNode(0.0, StagingError("decode queue is full"))}, every(0.001, 3))
    assert {(one.failure, one.reason) for one in loop.records} == {("RESOURCE_EXHAUSTED", "decode queue is full")}


# The command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no --target"),
        (("--target", "127.0.0.1:1"), "no --rate"),
        (("--target", "127.0.0.1:1", "--target", "127.0.0.1:1", "--rate", "1"), "--target 127.0.0.1:1 is given twice"),
        (("--target", "127.0.0.1:1", "--rate", "1"), "either --requests or --duration"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--duration", "1"), "either --requests or --duration"),
        (("--target", "127.0.0.1:1", "--rate", "0", "--requests", "1"), "--rate is 0"),
        (("--target", "127.0.0.1:1", "--rate", "1,x", "--requests", "1"), "--rate has 'x'"),
        (("--target", "127.0.0.1:1", "--rate", "nan", "--requests", "1"), "--rate is nan"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "0"), "--requests is 0"),
        (("--target", "127.0.0.1:1", "--rate", "9", "--duration", "-1"), "--duration is -1"),
        (("--target", "127.0.0.1:1", "--rate", "90000", "--duration", "900"), "is over 1000000 requests"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--arrivals", "gamma"), "--arrivals is 'gamma'"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--choice", "best"), "--choice is 'best'"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--shared-prefix", "2"), "--shared-prefix is 2"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--slo-ttft", "0"), "--slo-ttft is 0"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--prompt-tokens", "x"), "--prompt-tokens is 'x'"),
        (("--target", "127.0.0.1:1", "--trace", "/nowhere", "--requests", "1"), "leave out --requests"),
        (("--target", "127.0.0.1:1", "--trace", "/nowhere", "--insecure"), "--trace is /nowhere; it cannot be read"),
        (("--target", "localhost", "--rate", "1", "--requests", "1", "--insecure"), "'localhost'"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--insecure", "--plot", "a.svg"), "--plot is a.svg"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--insecure", "--plot", f"{'x' * 300}/a.png"), "folder"),
        (("--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--insecure", "--json", "/proc/x"), "--json is /proc/x"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_bad_input(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert says in result.output
    assert result.exit_code == exit_codes.BAD_INPUT, result.output
    assert "Traceback" not in result.output


def test_nobody_there_is_unavailable() -> None:
    result = CliRunner().invoke(
        app, ["bench", "serve", "--target", "127.0.0.1:1", "--rate", "1", "--requests", "1", "--insecure"]
    )
    assert result.exit_code == exit_codes.UNAVAILABLE
    assert "127.0.0.1:1" in result.output


def test_the_report_is_json() -> None:
    """Also where nothing was served, and with every value that is not JSON's own."""
    summary = summarise([record(0, due_s=0.0, first_s=0.1)], rate=1.0, window_s=1.0, objectives=Objectives(), lateness=ON_TIME)
    content: dict[str, Any] = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert content["ttft_s"]["p50"] == pytest.approx(0.1)
    assert content["is_late"] is False
    json.dumps(summarise([], rate=1.0, window_s=1.0, objectives=Objectives(), lateness=ON_TIME).to_json(), allow_nan=False)


def printed(records: list[Record], **settings: Any) -> tuple[str, dict[str, str]]:
    """The report of one rate as it is printed, and the style of each line under the tables."""
    summary = summarise(records, rate=1.0, window_s=10.0, objectives=Objectives(), lateness=ON_TIME)
    report = LoadReport(
        summaries=[summary], objectives=Objectives(), settings={"seed": 41, "timeout_s": 7.0, "shared_prefix": 0.0} | settings,
        nodes=[], machine={}, command="", date="", load_before=0.0,
    )  # fmt: skip
    console = Console(file=StringIO(), highlight=False)
    print_report(report, console)
    return cast(StringIO, console.file).getvalue(), {line.plain: str(line.style) for line in lines_of(report)}


def failed(index: int, *, is_warm_up: bool = False) -> Record:
    return Record(
        index=index, target="d", due_s=1.0, prompt_tokens=10, is_warm_up=is_warm_up, sent_s=1.0, ended_s=8.0,
        failure="DEADLINE_EXCEEDED", reason="too late",
    )  # fmt: skip


def test_a_report_says_whose_times_it_has() -> None:
    served = [record(index, due_s=index, first_s=0.1) for index in range(99)]
    text, lines = printed([*served, failed(99)])
    assert "times of served requests in ms" in text and "nobody knows how long" not in text, "1 % is no more than 1 %"
    text, lines = printed([*served[:97], failed(97), failed(98), failed(99)])
    (line,) = [line for line in lines if "nobody knows" in line]
    assert "3.0% of the requests failed: the times are of those that were served, each of them within --timeout, 7 s" in line
    assert lines[line] == "red" and line in text
    assert "--seed 41 sends the same requests again" in text


def test_a_report_says_what_was_not_moved() -> None:
    kept = [record(index, due_s=index, first_s=0.1) for index in range(4)]
    for one in kept[:2]:
        assert one.moved is not None
        one.moved = replace(one.moved, cached_tokens=8)
    text, lines = printed(kept)
    (line,) = [line for line in lines if "prompt tokens were there already" in line]
    assert "16 of 40 prompt tokens were there already (40.0%), though nothing shared was asked for" in line
    assert lines[line] == "yellow" and " 40.0% " in text
    text, lines = printed(kept, shared_prefix=0.4)
    assert " 40.0% " in text and not [line for line in lines if "were there already" in line]


def test_a_warm_up_that_failed_is_told() -> None:
    _, lines = printed([failed(0, is_warm_up=True), failed(1, is_warm_up=True), record(2, due_s=2.0, first_s=0.1)])
    (line,) = [line for line in lines if "warm-up" in line]
    assert line.endswith("2 requests of the warm-up failed, such as: too late") and lines[line] == "red"
