"""A direct session whose link fails as its gathers are about to begin: nothing is copied for it, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from examples.one_process import TwoTiers
from tests.runtime.instances import until
from transfer.layout import DType, KVLayout, Shard
from transfer.transport.base import ByteRange, DirectMemory
from transfer.transport.inproc import InprocSession
from transfer.transport.memory import DeviceSlice

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


@pytest.fixture
def fails_after_attach(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ByteRange]]:
    """Offers the ring once, at attach, and fails then; the ranges that were asked for."""
    asked: list[ByteRange] = []

    def direct(session: InprocSession, target_range: ByteRange) -> DirectMemory | None:
        asked.append(target_range)
        if len(asked) > 1:
            return None
        return DeviceSlice(owner=session, address=0, num_bytes=target_range.num_bytes, device_index=0)

    monkeypatch.setattr(InprocSession, "direct", direct)
    yield asked


async def test_nothing_is_gathered_for_a_session_that_is_closed(fails_after_attach: list[ByteRange]) -> None:
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=16), is_one_sided=True)
    try:
        (sender,) = tiers.senders
        tiers.start("a", 40)
        await tiers.compute("a", 40)
        await until(lambda: "a" in sender.failed)
        assert sender.failed["a"] == "the gather cannot be made: the link failed"
        assert len(fails_after_attach) == 2  # the others of the same moment found the session closed
        assert sender.closed == [1] and sender.loop.num_sessions == 0
        assert not torch.count_nonzero(sender.loop._staging.tensor)
        sender.loop.check_idle()
        assert sender.loop.num_slots_used == 0 and "a" not in sender.pages.allocator.owners()
    finally:
        tiers.close()
