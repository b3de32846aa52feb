"""What a scatter takes besides its bytes is made ready when its place is granted, once, and not kept longer than its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from examples.one_process import TwoTiers
from tests.runtime.instances import until
from transfer.layout import DType, KVLayout, Shard
from transfer.receive import events as protocol
from transfer.receive.loop import ReceiverLoop

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


@pytest.fixture
async def tiers() -> AsyncIterator[TwoTiers]:
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=8), is_one_sided=True)
    yield tiers
    tiers.close()


async def test_what_was_prepared_for_a_request_that_is_given_up_is_dropped(tiers: TwoTiers) -> None:
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


async def test_a_request_that_ends_in_the_same_turn_as_its_grant_is_not_prepared() -> None:
    """Between a grant and its preparation lies a turn of the loop, in which the request may have been given up and be gone."""
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=8), is_one_sided=True, receiver_type=ClosesAtGrant)
    (receiver,) = tiers.receivers
    assert isinstance(receiver.loop, ClosesAtGrant)
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    tiers.start("a", 40)
    await until(lambda: "a" in receiver.drained)
    await asyncio.sleep(0.01)  # turns in which pieces would be prepared
    assert receiver.loop.closed_for == "a" and receiver.loop.num_prepared == 0 and errors == []
    receiver.loop.check_idle()
    tiers.close()
