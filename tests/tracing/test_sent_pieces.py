"""Spans of pieces that a prefill rank sends: each in its own request's, whatever became of the slot's last one."""

from __future__ import annotations

from typing import Any

import pytest

from examples.one_process import TwoTiers
from node_runtime.host_copy_lane import HostCopyLane
from node_runtime.tracing_client import OtelTracer
from tests.runtime.instances import until
from tests.tracing.collector import Collector, listening
from transfer.config import TracingConfig
from transfer.layout import DType, KVLayout, Shard

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


async def test_a_piece_that_was_never_written_leaves_no_span_to_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced request is given up while its pieces are gathered; one that is not traced has their slots then."""
    collector = Collector()
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=16), is_one_sided=False)
    (sender,) = tiers.senders
    gather = HostCopyLane.gather

    def gather_and_give_up(lane: HostCopyLane, *piece: Any, **how: Any) -> None:
        gather(lane, *piece, **how)
        sender.loop.abort_request("traced", "enough")  # heard before the end of the gather

    with listening(collector) as port:
        tracer = OtelTracer(TracingConfig(endpoint=f"http://127.0.0.1:{port}"), role="prefill", rank=0)
        try:
            tiers.start("traced", 40)
            span = tracer.begin("kvferry.send")
            assert span is not None
            sender.loop._spans["traced"] = span
            with monkeypatch.context() as patch:
                patch.setattr(HostCopyLane, "gather", gather_and_give_up)
                await tiers.compute("traced", 40)
                await until(lambda: "traced" in sender.failed)
            assert not sender.loop._gathered, "nothing is kept of a request that is over"
            tiers.start("other", 40)
            await tiers.compute("other", 40)
            await until(lambda: "other" in sender.sent)
        finally:
            tiers.close()
            tracer.close()
        names = {one.name for one in collector.all()}
    assert "kvferry.gather" in names and "kvferry.send" in names
    assert "kvferry.write" not in names
