"""The report's arithmetic, and what makes a run a success."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvferry.demo_print import LEGEND, cost_line, print_report, verdict
from kvferry.demo_report import DemoReport, RequestOutcome, find_leaks, find_mismatches, make_report, percentile
from kvferry.reference_generate import ReferenceResult
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb


def outcome(*token_ids: int, prompt_tokens: int = 10, **stats: float) -> RequestOutcome:
    ttft_s = stats.pop("ttft_s", 0.0)
    done = pb.GenerateDone(stats=pb.TransferStats(**stats), ttft_s=ttft_s)  # type: ignore[arg-type]
    return RequestOutcome(prompt_tokens=prompt_tokens, token_ids=token_ids, done=done)


def wanted(*token_ids: int, prompt_tokens: int = 10) -> ReferenceResult:
    return ReferenceResult(prompt_tokens=prompt_tokens, token_ids=token_ids)


DECODE = pb.NodeStatus(
    role="decode",
    ranks=[
        pb.RankStatus(rank=0, ring_peak_bytes=500, watermark_acks=7),
        pb.RankStatus(rank=1, ring_peak_bytes=900, watermark_acks=5),
    ],
    links=[
        pb.LinkStatus(lane="ucx/shm", bandwidth_bytes_per_s=4e9),
        pb.LinkStatus(lane="ucx/net", bandwidth_bytes_per_s=1e9),
        pb.LinkStatus(lane="ucx/shm", bandwidth_bytes_per_s=3e9),
    ],
)


def report_of(
    outcomes: list[RequestOutcome],
    reference: Sequence[ReferenceResult | None],
    *,
    leaked: tuple[str, ...] = (),
    decode: pb.NodeStatus = DECODE,
    dtype: str = "float32",
) -> DemoReport:
    return make_report(
        outcomes,
        reference,
        decode=decode,
        leaked=leaked,
        seconds=9.0,
        generate_seconds=3.0,
        dtype=dtype,
        environment={"cpu_cores": 2},
    )


GOOD = (
    [
        outcome(1, 2, bytes=100, writes=2, writes_without_staging=50, transfer_s=0.3, exposed_s=0.1, ttft_s=1.0),
        outcome(3, 4, prompt_tokens=7, bytes=60, writes=1, writes_without_staging=30, transfer_s=0.1, exposed_s=0.1, ttft_s=2.0),
    ],
    [wanted(1, 2), wanted(3, 4, prompt_tokens=7)],
)


def test_sums_peaks_and_shares() -> None:
    report = report_of(*GOOD)
    assert report.is_success and report.tokens_match
    assert (report.requests, report.failed, report.prompt_tokens, report.generated_tokens) == (2, 0, 17, 4)
    assert (report.bytes_moved, report.writes, report.writes_without_staging) == (160, 3, 80)
    assert (report.ring_peak_bytes, report.watermark_acks) == (900, 12)
    assert (report.transport, report.links, report.link_bandwidth_bytes_per_s) == ("ucx/net, ucx/shm", 3, 3e9)
    assert report.overlap_ratio == pytest.approx(1 - 0.2 / 0.4)
    assert (report.transfer_seconds.p50, report.transfer_seconds.p99) == (0.1, 0.3)
    assert (report.exposed_seconds.p50, report.exposed_seconds.p99) == (0.1, 0.1)
    assert (report.ttft_seconds.p50, report.ttft_seconds.p99) == (1.0, 2.0)


def test_a_report_survives_json() -> None:
    content = json.loads(json.dumps(report_of(*GOOD).to_json()))
    assert content["transfer_seconds"] == {"p50": 0.1, "p99": 0.3}
    assert content["leaks"] == 0 and content["leaked"] == [] and content["environment"] == {"cpu_cores": 2}


def test_the_times_are_printed_with_what_they_mean() -> None:
    output = io.StringIO()
    print_report(Console(file=output, width=120), report_of(*GOOD))
    shown = output.getvalue()
    assert re.search(r"transfer p50 / p99 +│ +100\.0 / 300\.0 ms", shown) and re.search(
        r"exposed p50 / p99 +│ +100\.0 / 100\.0 ms", shown
    )
    assert re.search(r"overlap with compute +│ +50%", shown) and LEGEND in shown


def test_overlap_of_a_run_that_moved_nothing() -> None:
    failed = RequestOutcome(error="no prefill node")
    report = report_of([failed], [wanted(1)], decode=pb.NodeStatus())
    assert (report.overlap_ratio, report.bytes_moved, report.ring_peak_bytes, report.transport) == (0.0, 0, 0, "")
    assert (report.failed, report.tokens_match, report.is_success) == (1, False, False)
    assert cost_line(report) == "Nothing was moved."


@pytest.mark.parametrize(
    ("got", "right", "line"),
    [
        (outcome(1, 2, 9), wanted(1, 2, 3), "generated token 3 is 9, and 3 in a single process"),
        (outcome(1, 2), wanted(1, 2, 3), "it has 2 tokens, and 3 in a single process"),
        (outcome(1, 2, 3, 4), wanted(1, 2, 3), "it has 4 tokens, and 3 in a single process"),
        (outcome(1, prompt_tokens=11), wanted(1), "its prompt has 11 tokens, and 10 in a single process"),
        (RequestOutcome(error="rank 1 died"), wanted(1), "rank 1 died"),
    ],
)
def test_one_differing_request_fails_the_run(got: RequestOutcome, right: ReferenceResult, line: str) -> None:
    outcomes, reference = [*GOOD[0], got], [*GOOD[1], right]
    assert find_mismatches(outcomes, reference) == [f"request 3: {line}"]
    report = report_of(outcomes, reference)
    assert not report.tokens_match and not report.is_success
    assert "1 of 3 requests" in verdict(report)


def test_a_leak_fails_a_run_whose_tokens_are_right() -> None:
    report = report_of(*GOOD, leaked=("decode rank 0: ring_live_bytes is 5",))
    assert report.tokens_match and report.leaks == 1 and not report.is_success
    assert "1 things are left over" in verdict(report)


def test_nothing_is_compared_when_results_are_missing() -> None:
    with pytest.raises(ConfigError, match="2 outcomes and 1 reference"):
        report_of(GOOD[0], GOOD[1][:1])


@pytest.mark.parametrize(
    "field",
    [
        "pool_pages_reserved", "pool_pages_bound", "ring_live_bytes", "ring_live_grants", "ring_quarantined_bytes",
        "staging_slots_used", "requests", "pending_transfers", "ending_sessions",
    ],
)  # fmt: skip
def test_every_thing_that_a_rank_can_hold_is_a_leak(field: str) -> None:
    idle = pb.RankStatus(rank=0, pid=5, pool_pages=9, ring_capacity=64, ring_peak_bytes=9, staging_slots=4, sessions=2)
    holding = pb.RankStatus(rank=1, **{field: 3})  # type: ignore[arg-type]
    assert find_leaks(pb.NodeStatus(role="decode", ranks=[idle])) == []
    assert find_leaks(pb.NodeStatus(role="decode", ranks=[idle, holding])) == [f"decode rank 1: {field} is 3"]


@pytest.mark.parametrize("field", ["queued_requests", "running_requests"])
def test_requests_of_the_leader_are_leaks(field: str) -> None:
    assert find_leaks(pb.NodeStatus(role="prefill", **{field: 2})) == [f"prefill node: {field} is 2"]  # type: ignore[arg-type]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9


def test_percentile_without_values_and_with_a_wrong_share() -> None:
    assert percentile([], 0.5) == 0.0
    for share in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="share"):
            percentile([1.0], share)


def test_an_outcome_is_either_done_or_failed() -> None:
    for arguments in ({}, {"done": pb.GenerateDone(), "error": "x"}):
        with pytest.raises(ConfigError, match="exactly one"):
            RequestOutcome(**arguments)  # type: ignore[arg-type]


def test_cost_line_names_both_numbers_and_their_ratio() -> None:
    line = cost_line(report_of(*GOOD))
    assert "80 writes of 2 bytes" in line and "3 writes of 53 B" in line and "27 times fewer" in line


REFUSED = RequestOutcome(error="max_new_tokens is 4090; must be in [1, 4085]")
DIED = RequestOutcome(prompt_tokens=5, token_ids=(1,), error="rank 1 died")


def printed(outcomes: list[RequestOutcome], reference: list[ReferenceResult | None]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(console, report_of(outcomes, reference))
    return console.export_text()


def test_a_refusal_is_called_one() -> None:
    outcomes = [REFUSED, DIED, outcome(1, 2)]
    report = report_of(outcomes, [None] * 3)
    assert report.refusals == (f"request 1: {REFUSED.error}",) and report.failures == ("request 2: rank 1 died",)
    assert (report.failed, report.compared, report.tokens_match, report.is_success) == (2, 0, False, False)
    text = printed(outcomes, [None] * 3)
    assert "refused: request 1: max_new_tokens is 4090" in text and "failed: request 2: rank 1 died" in text
    assert "not compared" in text and "differ" not in text
    assert "Failed: 1 of 3 requests were refused, 1 of 3 requests failed." in text
    assert json.loads(json.dumps(report.to_json()))["refusals"] == list(report.refusals)


def test_what_was_compared_is_still_told() -> None:
    fine = printed([outcome(1, 2), REFUSED], [wanted(1, 2), None])
    assert "1 compared, none differs" in fine and "tokens differ" not in fine
    other = printed([outcome(1, 3), REFUSED], [wanted(1, 2), None])
    assert "NO" in other and "tokens differ: request 1: generated token 2 is 3" in other and "refused: request 2" in other
