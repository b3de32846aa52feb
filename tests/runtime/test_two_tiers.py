"""Two tiers of one rank each, in one process: gathers behind a device's event, prepared scatters, and direct sessions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from bench.two_tiers import TwoTiers
from tests.runtime.instances import until
from transfer.copy.piece_copier import PieceCopy
from transfer.errors import RemoteProtocolError
from transfer.layout import DType, KVLayout, Shard
from transfer.receive import events as protocol
from transfer.receive.loop import ReceiverLoop
from transfer.transport.base import ByteRange, DirectMemory
from transfer.transport.inproc import InprocSession
from transfer.transport.registered_memory import DeviceBuffer

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


@pytest.fixture
async def made() -> AsyncIterator[list[TwoTiers]]:
    """Tiers that a test makes; they are closed at its end."""
    tiers: list[TwoTiers] = []
    yield tiers
    for one in tiers:
        one.close()


def new_tiers(made: list[TwoTiers], *, layout: KVLayout = LAYOUT, decode_page_size: int = 16, **options: Any) -> TwoTiers:
    made.append(TwoTiers(layout, Shard(page_size=16), Shard(page_size=decode_page_size), is_one_sided=True, **options))
    return made[0]


# Gathers

ONE_LAYER = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


class DeviceWork:
    """Work on a device that lags behind, and the event after it. The KV is in the pool only after a wait for the event."""

    def __init__(self, tiers: TwoTiers, num_tokens: int) -> None:
        self.pages = tiers.senders[0].pages
        self.slots = self.pages.slots("a", num_tokens)
        self.kv = torch.arange(1, 1 + num_tokens * 8, dtype=torch.float16).view(num_tokens, 2, 4)
        self.waited_on = ""

    def synchronize(self) -> None:
        self.waited_on = threading.current_thread().name
        self.pages.pool.write(0, self.slots, self.kv, -self.kv)


async def test_the_gather_waits_for_the_devices_event_and_not_on_the_owners_loop(made: list[TwoTiers]) -> None:
    """Rule 13 with real copies."""
    tiers = new_tiers(made, layout=ONE_LAYER)
    tiers.start("a", 20)
    event = DeviceWork(tiers, 20)
    tiers.senders[0].loop.chunk_computed("a", 0, event)
    await until(lambda: "a" in tiers.receivers[0].complete)
    receiver = tiers.receivers[0].pages
    found_k, found_v = receiver.pool.read(0, receiver.slots("a", 20))
    assert torch.equal(found_k, event.kv) and torch.equal(found_v, -event.kv)
    assert event.waited_on not in ("", threading.main_thread().name)


# Scatters are prepared when their place is granted, once, and dropped with their request


async def test_scatters_prepared_for_a_cancelled_request_are_dropped(made: list[TwoTiers]) -> None:
    tiers = new_tiers(made, decode_page_size=8)
    (receiver,), (sender,) = tiers.receivers, tiers.senders
    tiers.start("a", 40)
    await until(lambda: receiver.loop.num_prepared)
    assert receiver.loop.cancel_request("a", "the client went away")
    await until(lambda: "a" in receiver.drained and "a" in sender.failed)
    assert receiver.loop.num_prepared == 0
    receiver.loop.check_idle()


class ClosesAtGrant(ReceiverLoop):
    """Loses the session of the first grant in the turn of the loop that the grant is made in."""

    closed_for = ""

    def _prepare_later(self, action: protocol.PrepareScatter) -> None:
        super()._prepare_later(action)
        if not self.closed_for:
            self.closed_for = action.piece.request_id
            self.close_session(action.piece.session, "the test ends it")


async def test_a_request_that_ends_in_the_same_turn_as_its_grant_is_not_prepared(made: list[TwoTiers]) -> None:
    """Between a grant and its preparation lies a turn of the loop, in which the request may have been given up and be gone."""
    tiers = new_tiers(made, decode_page_size=8, receiver_type=ClosesAtGrant)
    (receiver,) = tiers.receivers
    assert isinstance(receiver.loop, ClosesAtGrant)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    tiers.start("a", 40)
    await until(lambda: "a" in receiver.drained)
    await asyncio.sleep(0.01)  # turns in which pieces would be prepared
    assert receiver.loop.closed_for == "a" and receiver.loop.num_prepared == 0 and errors == []
    receiver.loop.check_idle()


# Direct sessions: refused when they are opened, or of a link that fails as its gathers are about to begin


def use_direct(monkeypatch: pytest.MonkeyPatch, address: int, most: int | None = None) -> list[ByteRange]:
    """Have sessions offer the ring at an address, at most so often; return the ranges that are asked for."""
    asked: list[ByteRange] = []

    def direct(session: InprocSession, target_range: ByteRange) -> DirectMemory | None:
        asked.append(target_range)
        if most is not None and len(asked) > most:
            return None
        return DeviceBuffer(owner=session, address=address, num_bytes=target_range.num_bytes, device_index=0)

    monkeypatch.setattr(InprocSession, "direct", direct)
    return asked


async def test_nothing_is_gathered_for_a_session_that_is_closed(made: list[TwoTiers], monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[PieceCopy] = []
    monkeypatch.setattr(PieceCopy, "gather", lambda piece, *_: gathered.append(piece))
    asked = use_direct(monkeypatch, address=0, most=1)  # at attach
    tiers = new_tiers(made)
    (sender,) = tiers.senders
    tiers.start("a", 40)
    await tiers.compute("a", 40)
    await until(lambda: "a" in sender.failed)
    assert sender.failed["a"] == "decode rank 0 is lost: the gather cannot be made: the link failed"
    assert len(asked) == 2  # the others of the same moment found the session closed
    assert sender.closed == [1] and sender.loop.num_sessions == 0
    assert gathered == []
    sender.loop.check_idle()
    assert sender.loop.num_slots_used == 0 and "a" not in sender.pages.allocator.owners()


@pytest.mark.parametrize("address", [8, 255, 4097])
async def test_a_ring_that_kernels_cannot_gather_into_is_refused_before_there_is_a_session(
    made: list[TwoTiers], monkeypatch: pytest.MonkeyPatch, address: int
) -> None:
    """Launching the gather would raise, and that ends the rank with all its sessions: by the fault of one peer."""
    tiers = new_tiers(made)
    (sender,) = tiers.senders
    use_direct(monkeypatch, address)
    with pytest.raises(RemoteProtocolError, match=f"ring begins at {address:#x} here; it must begin on a multiple of 256"):
        tiers.join(2, sender, 0)
    assert sender.loop.num_sessions == 1 and not sender.closed
