"""What a scatter takes besides its bytes is made ready when its place is granted, once, and not kept longer than its request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from examples.one_process import TwoTiers
from tests.runtime.instances import until
from transfer.layout import DType, KVLayout, Shard

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=2, head_dim=4, dtype=DType.FLOAT16)


@pytest.fixture
async def tiers() -> AsyncIterator[TwoTiers]:
    tiers = TwoTiers(LAYOUT, Shard(page_size=16), Shard(page_size=8), is_one_sided=True)
    yield tiers
    tiers.close()


async def test_pieces_are_prepared_before_their_bytes_come_and_only_once(
    tiers: TwoTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    (receiver,), (sender,) = tiers.receivers, tiers.senders
    prepared: list[int] = []
    prepare = receiver.loop.copier.prepare

    def counted(*arguments: Any, **options: Any) -> Any:
        prepared.append(arguments[2].index)
        return prepare(*arguments, **options)

    monkeypatch.setattr(receiver.loop.copier, "prepare", counted)
    tiers.start("a", 40)
    await until(lambda: len(prepared) == receiver.loop.ring.num_live_grants > 0)
    granted = list(prepared)
    assert not receiver.complete and "a" not in sender.sent
    assert len(receiver.pages.allocator.pages("a")) > 0, "its pages are bound"
    await tiers.compute("a", 40)
    await until(lambda: "a" in receiver.complete and "a" in sender.sent)
    tiers.assert_arrived("a", 40)
    assert prepared[: len(granted)] == granted and len(set(prepared)) == len(prepared), "no scatter prepared its piece again"
    assert not receiver.loop._prepared


async def test_what_was_prepared_for_a_request_that_is_given_up_is_dropped(tiers: TwoTiers) -> None:
    (receiver,), (sender,) = tiers.receivers, tiers.senders
    tiers.start("a", 40)
    await until(lambda: bool(receiver.loop._prepared))
    assert receiver.loop.cancel_request("a", "the client went away")
    await until(lambda: "a" in receiver.drained and "a" in sender.failed)
    assert not receiver.loop._prepared
    receiver.loop.check_idle()


async def test_a_request_that_ends_in_the_same_turn_as_its_grant_is_not_prepared(tiers: TwoTiers) -> None:
    """Between a grant and its preparation lies a turn of the loop, in which the request may have been given up and be gone."""
    (receiver,), _ = tiers.receivers, tiers.senders
    grant = receiver.loop._carry_out
    seen: list[str] = []

    def carry_out(action: Any) -> None:
        grant(action)
        if type(action).__name__ == "PrepareScatter" and not seen:
            seen.append(action.request_id)
            receiver.loop.close_session(action.session, "the test ends it")

    receiver.loop._pump._carry_out = carry_out
    tiers.start("a", 40)
    await until(lambda: bool(seen) and "a" in receiver.drained)
    assert not receiver.loop._prepared
    receiver.loop.check_idle()
