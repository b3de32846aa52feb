"""The report's arithmetic, and what makes a run a success."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from kvferry.demo.reference import ReferenceResult
from kvferry.demo.report import DemoReport, DemoRequest, find_leaks, find_mismatches, make_report
from kvferry.demo.view import print_report, verdict
from transfer.pb import kvferry_pb2 as pb


def outcome(*token_ids: int, prompt_tokens: int = 10) -> DemoRequest:
    return DemoRequest(prompt_tokens=prompt_tokens, token_ids=list(token_ids), done=pb.GenerateDone())


def wanted(*token_ids: int, prompt_tokens: int = 10) -> ReferenceResult:
    return ReferenceResult(prompt_tokens=prompt_tokens, token_ids=token_ids)


def report_of(
    outcomes: list[DemoRequest],
    reference: Sequence[ReferenceResult | None],
    *,
    leaked: tuple[str, ...] = (),
) -> DemoReport:
    return make_report(
        outcomes,
        reference,
        decode=pb.NodeStatus(),
        leaked=leaked,
        seconds=9.0,
        generate_seconds=3.0,
        dtype="float32",
        environment={"cpu_cores": 2},
    )


GOOD = ([outcome(1, 2), outcome(3, 4, prompt_tokens=7)], [wanted(1, 2), wanted(3, 4, prompt_tokens=7)])


@pytest.mark.parametrize(
    ("got", "right", "line"),
    [
        (outcome(1, 2, 9), wanted(1, 2, 3), "generated token 3 is 9, and 3 in a single process"),
        (outcome(1, 2), wanted(1, 2, 3), "it has 2 tokens, and 3 in a single process"),
        (outcome(1, 2, 3, 4), wanted(1, 2, 3), "it has 4 tokens, and 3 in a single process"),
        (outcome(1, prompt_tokens=11), wanted(1), "its prompt has 11 tokens, and 10 in a single process"),
        (DemoRequest(error="rank 1 died"), wanted(1), "rank 1 died"),
    ],
)
def test_one_differing_request_fails_the_run(got: DemoRequest, right: ReferenceResult, line: str) -> None:
    outcomes, reference = [*GOOD[0], got], [*GOOD[1], right]
    assert find_mismatches(outcomes, reference) == [f"request 3: {line}"]
    report = report_of(outcomes, reference)
    assert not report.tokens_match and not report.is_success
    assert "1 of 3 requests" in verdict(report)


def test_a_leak_fails_a_run_whose_tokens_are_right() -> None:
    report = report_of(*GOOD, leaked=("decode rank 0: ring_live_bytes is 5",))
    assert report.tokens_match and report.leaks == 1 and not report.is_success
    assert "1 resources are left over" in verdict(report)


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


REFUSED = DemoRequest(error="max_new_tokens is 4090; must be in [1, 4085]")
DIED = DemoRequest(prompt_tokens=5, token_ids=[1], error="rank 1 died")


def printed(outcomes: list[DemoRequest], reference: list[ReferenceResult | None]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(console, report_of(outcomes, reference))
    return console.export_text()


def test_a_refused_request_is_reported_as_refused() -> None:
    outcomes = [REFUSED, DIED, outcome(1, 2)]
    report = report_of(outcomes, [None] * 3)
    assert report.refusals == (f"request 1: {REFUSED.error}",) and report.failures == ("request 2: rank 1 died",)
    assert (report.failed, report.compared, report.tokens_match, report.is_success) == (2, 0, False, False)
    text = printed(outcomes, [None] * 3)
    assert "refused: request 1: max_new_tokens is 4090" in text and "failed: request 2: rank 1 died" in text
    assert "not compared" in text and "differ" not in text
    assert "Failed: 1 of 3 requests were refused, 1 of 3 requests failed." in text
    assert json.loads(json.dumps(report.to_json()))["refusals"] == list(report.refusals)
