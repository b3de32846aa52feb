"""Spans of pieces that a prefill rank sends: each in its own request's, whatever became of the slot's last one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench import two_tiers
from bench.two_tiers import TwoTiers
from node_runtime.tracing_client import OtelTracer
from tests.runtime.instances import until
from tests.tracing.collector import Collector, listening
from transfer.config import TracingConfig
from transfer.copy.host_copy_queue import HostCopyQueue
from transfer.layout import DType, KVLayout, Shard
from transfer.piece import RankRequest

TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


async def test_a_piece_that_was_never_written_leaves_no_span_to_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced request is given up while its pieces are gathered; one that is not traced has their slots then."""
    collector = Collector()
    with listening(collector) as port:
        tracer = OtelTracer(TracingConfig(endpoint=f"http://127.0.0.1:{port}"), role="prefill", rank=0)
        context_of = two_tiers.inproc_context
        monkeypatch.setattr(two_tiers, "inproc_context", lambda *given, **how: replace(context_of(*given, **how), tracer=tracer))
        tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=16), is_one_sided=False)
        (sender,) = tiers.senders
        start, gather = sender.loop.start_request, HostCopyQueue.gather

        def start_traced(request: RankRequest) -> None:
            start(replace(request, traceparent=TRACEPARENT if request.request_id == "traced" else ""))

        def gather_and_give_up(lane: HostCopyQueue, *piece: Any, **how: Any) -> None:
            gather(lane, *piece, **how)
            sender.loop.abort_request("traced", "enough")  # heard before the end of the gather

        monkeypatch.setattr(sender.loop, "start_request", start_traced)
        try:
            tiers.start("traced", 40)
            with monkeypatch.context() as patch:
                patch.setattr(HostCopyQueue, "gather", gather_and_give_up)
                await tiers.compute("traced", 40)
                await until(lambda: "traced" in sender.failed)
            tiers.start("other", 40)
            await tiers.compute("other", 40)
            await until(lambda: "other" in sender.sent)
        finally:
            tiers.close()
            tracer.close(30.0)
        names = {one.name for one in collector.all()}
    assert "kvferry.gather" in names and "kvferry.send" in names
    assert "kvferry.write" not in names
