"""The simulation of a cluster: against theory where there is some, and what must hold of every run."""

from __future__ import annotations

import json
import random
import re
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import simulate as command
from bench.scaling import CHUNK_TOKENS, fit, predicted_again
from bench.simulation.clock import Clock, SharedCpu
from bench.simulation.cluster import Cluster
from bench.simulation.outcome import simulate
from bench.simulation.settings import ClusterSettings, Placement
from bench.simulation.sizing import load_of, means_of, size, splits_of
from bench.simulation.stage_times import StageTimes
from kvferry.bench_serve.options import shape_of
from kvferry.bench_serve.summary import Objectives
from kvferry.bench_serve.workload import Planned, Shape
from transfer.config import DecodeNodeConfig, NodeConfig, PrefillNodeConfig
from transfer.config import settings as settings_of_nodes

ROOT = Path(__file__).resolve().parents[2]
NOTHING_S = 1e-9

TIMES = StageTimes(
    name="round numbers",
    bytes_per_token=1024,
    prefill_step_s=0.002,
    prefill_token_s=0.0001,
    prefill_attention_s=0.0,
    decode_step_s=0.01,
    decode_request_s=0.001,
    decode_context_s=0.0,
    gather_s=0.0001,
    gather_bytes_per_s=1e10,
    link_latency_s=0.0005,
    link_bytes_per_s=1e9,
    scatter_s=0.0001,
    scatter_bytes_per_s=1e10,
    hand_s=0.0002,
    grant_s=0.001,
    ack_s=0.001,
    reserve_s=0.002,
    request_s=0.002,
)
SETTINGS = ClusterSettings(chunk_tokens=128, max_step_tokens=512, ring_bytes=4 << 20, prefill_running=64, decode_running=64)


def shape(prompt: str = "uniform:50:500", output: str = "uniform:4:40") -> Shape:
    return shape_of(prompt, output)


def load(rate: float, number: int, *, seed: int = 1, of: Shape | None = None) -> tuple[Planned, ...]:
    return load_of(of or shape(), rate=rate, number=number, seed=seed)


# Theory


def test_a_prefill_node_alone_is_an_m_d_1_queue() -> None:
    """One prompt a step, all of one length, nothing else takes time: the mean wait is that of Pollaczek and Khinchine."""
    service_s, part = 0.01, 0.6
    others = dict.fromkeys(("prefill_step_s", "gather_s", "link_latency_s", "scatter_s", "hand_s"), 0.0)
    others |= dict.fromkeys(("grant_s", "ack_s", "reserve_s", "request_s"), NOTHING_S)
    times = replace(
        TIMES, prefill_token_s=service_s / 100, link_bytes_per_s=1e15, gather_bytes_per_s=1e15, scatter_bytes_per_s=1e15, **others
    )
    unbounded = replace(
        SETTINGS, chunk_tokens=100, max_step_tokens=100, prefill_running=10**6, decode_running=10**6, max_queued=10**6,
        staging_slots=1000, ring_bytes=1 << 30, prefill_pool_tokens=10**9, decode_pool_tokens=10**9,
    )  # fmt: skip
    outcome = simulate(times, unbounded, load(part / service_s, 20_000, of=shape("100", "1")))
    expected_s = service_s + part * service_s / (2 * (1 - part))
    assert outcome.ttft_s.mean == pytest.approx(expected_s, rel=0.05)
    assert outcome.busy["prefill steps"] == pytest.approx(part, rel=0.02)
    assert outcome.bottleneck == "prefill steps"


def test_shared_cores_are_an_m_m_1_queue_with_processor_sharing() -> None:
    clock, chance, took_s = Clock(), random.Random(3), list[float]()
    cpu, rate, at_s = SharedCpu(clock, 1.0), 0.5, 0.0

    def arrive(began_s: float, work_s: float) -> None:
        cpu.run(work_s, lambda: took_s.append(clock.now_s - began_s))

    for _ in range(20_000):
        at_s += chance.expovariate(rate)
        work_s = chance.expovariate(1.0)
        clock.at(at_s, lambda at_s=at_s, work_s=work_s: arrive(at_s, work_s))  # type: ignore[misc]
    clock.run()
    assert statistics.fmean(took_s) == pytest.approx(1 / (1 - rate), rel=0.05)
    assert cpu.busy_core_s / clock.now_s == pytest.approx(rate, rel=0.02)


def test_one_request_takes_what_its_stages_take() -> None:
    (one,) = Cluster(TIMES, SETTINGS).run([Planned(at_s=0.0, prompt_tokens=256, output_tokens=11)])
    piece = 128 * 1024
    computed_s = TIMES.request_s / 2 + TIMES.reserve_s + 2 * TIMES.prefill_seconds([(128, 0)])
    transfer_s = (
        TIMES.gather_seconds(piece) + piece / 1e9 + TIMES.link_latency_s + TIMES.scatter_seconds(piece) + 2 * TIMES.hand_s
    )
    assert one.computed_s == pytest.approx(computed_s)
    assert one.whole_s == pytest.approx(computed_s + transfer_s)
    assert one.first_token_s == pytest.approx(max(one.whole_s, computed_s + TIMES.request_s / 2))
    assert one.tpot_s == pytest.approx(TIMES.decode_seconds(1, 0))
    assert one.exposed_s == pytest.approx(transfer_s + TIMES.ack_s)


def test_a_slot_is_free_when_its_write_ends_and_the_pages_after_the_last_ack() -> None:
    """Six computed pieces pass two slots before any ack. The next prompt gets the pages after the last one."""
    times, few = replace(TIMES, ack_s=10.0, link_bytes_per_s=1e6), replace(SETTINGS, staging_slots=2, prefill_pool_tokens=800)
    first, second = Cluster(times, few).run([Planned(at_s=at_s, prompt_tokens=768, output_tokens=4) for at_s in (0.0, 0.0)])
    assert first.whole_s < 1.0
    assert second.started_s == pytest.approx(first.whole_s + times.ack_s + times.reserve_s)


def test_steps_that_are_leapt_over_are_those_that_are_made_one_by_one() -> None:
    """Without sharing, equal decode steps are one event; a million shared cores make every step and come to the same times."""
    planned = load(12, 300)
    for context_s, near in ((0.0, 1e-9), (1e-6, 2e-3)):  # contexts that grow meanwhile are taken at their mean
        times = replace(TIMES, decode_context_s=context_s, link_bytes_per_s=1e14)
        leapt, stepped = (simulate(one, SETTINGS, planned) for one in (times, replace(times, cores=1e6)))
        assert stepped.num_events > 1.5 * leapt.num_events
        for name in ("ttft_s", "tpot_s", "end_to_end_s"):
            assert getattr(leapt, name).mean == pytest.approx(getattr(stepped, name).mean, rel=near)


# What holds of every run


@given(
    small=st.builds(
        ClusterSettings,
        num_prefill=st.integers(1, 4),
        num_decode=st.integers(1, 4),
        chunk_tokens=st.just(64),
        max_step_tokens=st.just(128),
        layer_groups=st.sampled_from([1, 2, 3]),
        staging_slots=st.integers(2, 5),
        ring_bytes=st.integers(1, 6).map(lambda pieces: pieces * 64 * 1024),
        prefill_running=st.integers(1, 8),
        decode_running=st.integers(1, 8),
        prefill_pool_tokens=st.integers(300, 4000),
        decode_pool_tokens=st.integers(300, 4000),
        max_queued=st.integers(1, 20),
        queue_timeout_s=st.just(2.0),
        placement=st.sampled_from(list(Placement)),
    ),
    rate=st.floats(1, 400),
    seed=st.integers(0, 1000),
    cores=st.sampled_from([0.0, 1.5]),
)
@settings(max_examples=30)
def test_every_request_ends_and_nothing_is_kept(small: ClusterSettings, rate: float, seed: int, cores: float) -> None:
    """`Cluster.run` asserts it at the end, and at each step that no ring, slot or pool holds more than there is."""
    outcome = simulate(replace(TIMES, cores=cores), small, load(rate, 60, seed=seed))
    assert outcome.served + sum(outcome.failures.values()) == outcome.requests
    assert outcome.uses["ring bytes"].most <= small.ring_bytes
    assert outcome.uses["staging slots"].most <= small.staging_slots
    assert outcome.uses["decode requests"].most <= small.decode_running


def test_room_is_taken_whole_or_not_at_all() -> None:
    """With room for one request at a time they are served one after the other, and all of them."""
    requests = Cluster(TIMES, replace(SETTINGS, decode_pool_tokens=540)).run(load(30, 40))
    served = sorted((one for one in requests if one.is_served), key=lambda one: one.started_s)
    assert len(served) == 40
    for earlier, later in pairwise(served):
        if sum(one.prompt_tokens + one.output_tokens for one in (earlier, later)) > 540:
            assert later.started_s >= earlier.ended_s


def test_equal_prefill_nodes_must_take_turns() -> None:
    """A decode node knows its own requests alone: where many have few each, the first prefill node would get nearly all."""
    many = replace(SETTINGS, num_prefill=8, num_decode=16)
    light = load(20, 800)
    outcomes = {one: simulate(TIMES, replace(many, placement=one), light) for one in Placement}
    first, order, turns, informed = (
        outcomes[one] for one in (Placement.FIRST, Placement.ORDER, Placement.TURNS, Placement.INFORMED)
    )
    assert first.imbalance > 5
    assert turns.imbalance < order.imbalance < first.imbalance
    assert turns.imbalance < 1.6
    assert informed.imbalance < 1.6
    assert turns.ttft_s.p90 < first.ttft_s.p90


# Sizing


def test_sizing_finds_the_split_that_balances_the_work() -> None:
    objectives = Objectives(ttft_s=0.5, tpot_s=0.03)
    means = means_of(TIMES, SETTINGS, shape(), objectives)
    assert means.prefill_s == pytest.approx(275 * 0.0001 + 0.002 * 2.65, rel=0.05)  # 50 to 500 tokens in steps of 128
    assert means.decode_s == pytest.approx(21 * 0.03 / 20, rel=0.1)  # 20 requests a step of 30 ms, 21 steps
    found = size(TIMES, SETTINGS, shape(), objectives, num_nodes=4, lasts_s=1.0, seed=0, least_requests=200, say=_mute)
    assert found is not None
    assert found.settings.num_nodes == 4
    assert found.settings.num_prefill in splits_of(4, means)
    assert found.rate == max(found.tried.values())
    assert found.outcome.attainment >= 0.85
    assert found.settings.ring_bytes <= SETTINGS.ring_bytes
    json.dumps(found.to_json(), allow_nan=False)
    hopeless = Objectives(ttft_s=1e-6)
    assert size(TIMES, SETTINGS, shape(), hopeless, num_nodes=2, lasts_s=1.0, seed=0, least_requests=60, say=_mute) is None


def _mute(_: str) -> None:
    pass


# Stage times


def test_stage_times_are_read_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    file.write_text(json.dumps({"title": "a record", "stage_times": TIMES.to_json()}))
    assert StageTimes.read(file) == TIMES
    file.write_text(json.dumps(TIMES.to_json() | {"ack_s": -1}))
    with pytest.raises(ValueError, match="ack_s is -1"):
        StageTimes.read(file)


def test_fitting_finds_the_stage_times_that_made_the_samples() -> None:
    """Of a made-up machine: 3 ms a step, 0.4 ms a token, 10 ms a decode step and 2 ms a request of it, 30 ms a request."""
    samples = []
    piece_s = 0.001 + 0.002 + 0.003 + 2 * 0.0004
    for prompt in (32, 128, 256, 512, 1024, 2048):
        own_steps = -(-prompt // CHUNK_TOKENS)
        for output, batch in ((1, 1), (1, 4), (65, 1), (65, 4)):
            steps = own_steps if prompt < CHUNK_TOKENS or batch == 1 else own_steps * batch // 2  # two prompts in a step
            prefill_s = steps * 0.003 + batch * (0.0004 * prompt + 1e-7 * prompt**2 / 2)
            decode_s = (output - 1) * (0.01 + 0.002 * batch)
            request_s = prefill_s / batch + own_steps * piece_s + 0.03 + (output > 1) * decode_s / batch
            samples.append(
                {
                    "prompt_tokens": prompt, "output_tokens": output, "batch": batch, "requests": batch, "exposed_s": 0.0,
                    "prefill_steps": steps, "prefill_steps_s": prefill_s, "decode_steps": output - 1, "decode_steps_s": decode_s,
                    "ttft_s": prefill_s + piece_s + 0.03, "cpu_s": request_s, "tpot_s": 0.0, "num_bytes": prompt * 4096.0,
                }
            )  # fmt: skip
    found = fit(samples, {"gather": 0.001, "write": 0.002, "scatter": 0.003}, cores=1.9)
    times = found.times
    assert times.bytes_per_token == 4096
    assert times.prefill_step_s == pytest.approx(0.003, rel=0.02)
    assert times.prefill_token_s == pytest.approx(0.0004, rel=0.02)
    assert times.prefill_attention_s == pytest.approx(1e-7, rel=0.02)
    assert times.request_s + times.reserve_s == pytest.approx(0.03, rel=0.02)
    assert times.other_request_s == pytest.approx(0.0, abs=1e-4)
    assert times.decode_seconds(4, 0) == pytest.approx(0.018, rel=0.02)
    assert times.gather_seconds(CHUNK_TOKENS * 4096) == pytest.approx(0.001)
    assert times.other_token_s == pytest.approx(0.0, abs=1e-4)
    assert found.request_cpu_s(512, 1) == pytest.approx(samples[12]["cpu_s"], rel=0.02)


def test_the_simulation_still_predicts_what_a_record_says() -> None:
    record = json.loads((ROOT / "bench" / "results" / "2026-11-24-two-cores-scaling.json").read_text(encoding="utf-8"))
    record["rows"] = record["rows"][:3]
    for then, now in zip(record["rows"], predicted_again(record)["rows"], strict=True):
        for what in ("ttft_s.p50", "ttft_s.p90", "tpot_s.p50", "tpot_s.p90"):
            assert now[what]["predicted"] == pytest.approx(then[what]["predicted"], rel=1e-3), what


# The command


def test_the_command_says_which_settings_the_nodes_have_to_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are not the nodes' own, by their names, and no others."""
    one = ("--prefill", "1", "--decode", "1", "--rate", "2", "--requests", "20", "--prompt-tokens", "100", "--output-tokens", "4")
    assert command.main(list(one)) == 0
    assert "settings that nodes do not have" not in capsys.readouterr().out
    others = ["--max-step-tokens", "4096", "--decode-running", "128", "--ring-mib", "8192"]
    assert command.main([*one, *others]) == 0
    said = capsys.readouterr().out
    found = re.findall(r"^  (prefill|decode): ([a-z_.]+): (\d+)  \(default (\d+)\)$", said, re.M)
    assert ("prefill", "limits.max_step_tokens", "4096", "8192") in found
    assert ("decode", "limits.max_running_requests", "128", "256") in found
    assert ("decode", "ring.capacity_bytes", str(8 << 30), str(2 << 30)) in found
    assert "staging.num_slots" not in said
    known: dict[str, type[NodeConfig]] = {"prefill": PrefillNodeConfig, "decode": DecodeNodeConfig}
    for role, name, _, _ in found:
        assert name in {path for path, _ in settings_of_nodes(known[role])}


def test_the_command_simulates_and_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.json"
    assert command.main(["--rate", "9", "--prefill", "2", "--decode", "1", "--requests", "300", "--json", str(file)]) == 0
    assert "TTFT p50 / p90 / p99" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert content["outcome"]["requests"] == 240
    assert content["settings"]["num_prefill"] == 2
    assert StageTimes.of(content["stage_times"], where="x") == command.stage_times("h100-llama-3-8b")
    crowd = ["--requests", "300", "--decode-running", "4", "--rate", "400"]
    assert command.main(crowd) == 0
    assert "failed: these times are of the requests that were served" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either --nodes"),
        (("--rate", "0"), "--rate is 0; it must be above 0 and at most 100000 requests a second"),
        (("--rate", "1", "--json", "/nowhere/x"), "--json is /nowhere/x; it cannot be written: No such file or directory"),
        (("--rate", "1", "--ring-mib", "1"), "does not fit it"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
