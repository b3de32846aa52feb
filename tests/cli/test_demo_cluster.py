"""`kvferry demo-cluster`: which options it refuses, and when it calls a run a success."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import cast

import pytest
from rich.console import Console

from kvferry.bench_serve.report import LoadReport
from kvferry.bench_serve.summary import Lateness, Moved, Objectives, Record, Spread, summarise
from kvferry.demo.cluster import ClusterSummary, print_summary
from kvferry.demo.options import DemoClusterOptions
from transfer.errors import ConfigError


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"num_prefill": 0}, "--prefill is 0; it must be in [1, 16]"),
        ({"seconds": float("inf")}, "--seconds is inf; it must be above 0"),
    ],
)
def test_what_cannot_be_run_is_refused(option: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        DemoClusterOptions(**option)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("warm_up_fails", "cut_off", "is_success"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_every_request_is_answered_only_where_every_request_is(warm_up_fails: bool, cut_off: bool, is_success: bool) -> None:
    """Those of the warm-up are among them."""
    moved = Moved(
        node_ttft_s=0.1, transfer_s=0.1, exposed_s=0.0, num_bytes=1, writes=1, resends=0, prefill_node="p", retries=0,
        cached_tokens=0,
    )  # fmt: skip
    warm = Record(index=0, target="d", due_s=0.0, prompt_tokens=1, is_warm_up=True, sent_s=0.0, token_s=[0.1], moved=moved)
    if warm_up_fails:
        warm = replace(warm, moved=None, failure="UNAVAILABLE", reason="no prefill node is joined")
    served = Record(index=1, target="d", due_s=1.0, prompt_tokens=1, sent_s=1.0, token_s=[1.1], moved=moved)
    records = [warm, served, *([replace(served, index=2, moved=None)] if cut_off else [])]
    on_time = Lateness(sends_s=Spread(), loop_s=Spread(), cpu_share=0.0, limit_s=0.1)
    load = LoadReport(
        summaries=[summarise(records, rate=1.0, window_s=1.0, objectives=Objectives(), lateness=on_time)],
        objectives=Objectives(), settings={}, nodes=[], machine={}, command="", date="", load_before=0.0,
    )  # fmt: skip
    summary = ClusterSummary(ready_s=1.0, load=load, page_ms=[], page_bytes=0, ring_peaks={}, links={}, alerts=None)
    assert summary.is_success is is_success
    console = Console(file=StringIO(), highlight=False)
    print_summary(summary, console)
    assert ("every request was answered" in cast(StringIO, console.file).getvalue()) is is_success
