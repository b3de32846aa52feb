"""Direct sessions that are of no use: refused when they are opened, or of a link that fails as its gathers are about to begin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.one_process import TwoTiers
from tests.runtime.instances import until
from transfer.copy.piece_copier import PieceCopy
from transfer.errors import RemoteProtocolError
from transfer.layout import DType, KVLayout, Shard
from transfer.transport.base import ByteRange, DirectMemory
from transfer.transport.inproc import InprocSession
from transfer.transport.registered_memory import DeviceBuffer

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


@pytest.fixture
def fails_after_attach(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ByteRange]]:
    """Offers the ring once, at attach, and fails then; the ranges that were asked for."""
    asked: list[ByteRange] = []

    def direct(session: InprocSession, target_range: ByteRange) -> DirectMemory | None:
        asked.append(target_range)
        if len(asked) > 1:
            return None
        return DeviceBuffer(owner=session, address=0, num_bytes=target_range.num_bytes, device_index=0)

    monkeypatch.setattr(InprocSession, "direct", direct)
    yield asked


async def test_nothing_is_gathered_for_a_session_that_is_closed(
    fails_after_attach: list[ByteRange], monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[PieceCopy] = []
    monkeypatch.setattr(PieceCopy, "gather", lambda piece, *_: gathered.append(piece))
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=16), is_one_sided=True)
    try:
        (sender,) = tiers.senders
        tiers.start("a", 40)
        await tiers.compute("a", 40)
        await until(lambda: "a" in sender.failed)
        assert sender.failed["a"] == "decode rank 0 is lost: the gather cannot be made: the link failed"
        assert len(fails_after_attach) == 2  # the others of the same moment found the session closed
        assert sender.closed == [1] and sender.loop.num_sessions == 0
        assert gathered == []
        sender.loop.check_idle()
        assert sender.loop.num_slots_used == 0 and "a" not in sender.pages.allocator.owners()
    finally:
        tiers.close()


@pytest.mark.parametrize("address", [8, 255, 4097])
async def test_a_ring_that_kernels_cannot_gather_into_is_refused_before_there_is_a_session(
    monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    """Launching the gather would raise, and that ends the rank with all its sessions: by the fault of one peer."""

    def direct(session: InprocSession, target_range: ByteRange) -> DirectMemory:
        return DeviceBuffer(owner=session, address=address, num_bytes=target_range.num_bytes, device_index=0)

    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=16), is_one_sided=True)
    (sender,) = tiers.senders
    try:
        monkeypatch.setattr(InprocSession, "direct", direct)
        with pytest.raises(RemoteProtocolError, match=f"ring begins at {address:#x} here; it must begin on a multiple of 256"):
            tiers.join(2, sender, 0)
        assert sender.loop.num_sessions == 1 and not sender.closed
    finally:
        tiers.close()
