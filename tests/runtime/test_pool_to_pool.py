"""From four pools of one cut into two of another, through the whole machinery but for processes; see bench/two_tiers.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import cast

import pytest

from bench.two_tiers import ReceivingRank
from tests.runtime.instances import until
from tests.runtime.scattered_tiers import HybridTiers, ScatteredTiers
from transfer.chunk import ChunkPlan
from transfer.errors import LocalProtocolError
from transfer.layout import DType, KVLayout, Shard, TokenOrder
from transfer.receive import events as protocol
from transfer.receive.loop import ReceiverLoop
from transfer.transport.base import Session

LAYOUT = KVLayout.uniform(num_layers=4, num_kv_heads=4, head_dim=8, dtype=DType.FLOAT16)
PREFILL = Shard(tp_size=4, page_size=16)
DECODE = Shard(tp_size=2, page_size=32, order=TokenOrder.HND)


@pytest.fixture(params=[True, False], ids=["one-sided", "two-sided"])
async def tiers(request: pytest.FixtureRequest) -> AsyncIterator[ScatteredTiers]:
    one = ScatteredTiers(LAYOUT, PREFILL, DECODE, is_one_sided=request.param)
    yield one
    one.close()


def is_complete(tiers: ScatteredTiers, request_id: str) -> bool:
    return all(request_id in receiver.complete for receiver in tiers.receivers)


async def settled(tiers: ScatteredTiers) -> None:
    await until(tiers.is_idle)
    tiers.assert_nothing_is_left()


async def test_a_prompt_arrives_bit_for_bit(tiers: ScatteredTiers) -> None:
    tiers.start("a", 100)
    await tiers.compute("a", 100)
    await until(lambda: all("a" in receiver.complete for receiver in tiers.receivers))
    await until(lambda: all("a" in sender.sent for sender in tiers.senders))
    stats = [sender.sent["a"] for sender in tiers.senders]
    per_token = 4 * 2 * 4 * 8 * 2  # layers, K and V, heads, dim, bytes
    assert sum(one.num_bytes for one in stats) == 100 * per_token, "every byte is sent once"
    assert [one.writes for one in stats] == [10] * 4, "one write per chunk and route: 5 token ranges, 2 layer groups"
    tiers.assert_arrived("a", 100)
    await settled(tiers)


async def test_many_prompts_at_once_share_a_small_ring(tiers: ScatteredTiers) -> None:
    lengths = {f"r{index}": 1 + 37 * index % 150 for index in range(12)}
    for name, num_tokens in lengths.items():
        tiers.start(name, num_tokens)
    await asyncio.gather(*(tiers.compute(name, num_tokens) for name, num_tokens in lengths.items()))
    for name, num_tokens in lengths.items():
        await until(partial(is_complete, tiers, name))
        tiers.assert_arrived(name, num_tokens)
    assert all(receiver.loop.ring.position > receiver.loop.ring.capacity_bytes for receiver in tiers.receivers), "round and round"
    await until(lambda: all(len(sender.sent) == 12 for sender in tiers.senders))
    await settled(tiers)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (Shard(tp_size=2, page_size=64), Shard(tp_size=4, page_size=1)),
        (Shard(tp_size=3, page_size=7), Shard(tp_size=2, page_size=5, order=TokenOrder.HND)),
        (Shard(pp_size=2, page_size=16), Shard(tp_size=2, page_size=16)),
    ],
    ids=["2 to 4", "3 to 2", "two stages to one"],
)
async def test_other_cuts(prefill: Shard, decode: Shard) -> None:
    layout = KVLayout.uniform(num_layers=4, num_kv_heads=12, head_dim=4, dtype=DType.FLOAT16)
    tiers = ScatteredTiers(layout, prefill, decode, is_one_sided=False)
    tiers.start("a", 50)
    await tiers.compute("a", 50)
    await until(lambda: all("a" in receiver.complete for receiver in tiers.receivers))
    tiers.assert_arrived("a", 50)
    await settled(tiers)
    tiers.close()


@pytest.mark.parametrize("when", ["before it is computed", "half way", "after it arrived on one"])
async def test_a_cancelled_request_leaves_nothing_and_harms_nobody(tiers: ScatteredTiers, when: str) -> None:
    tiers.start("cancelled", 140)
    tiers.start("kept", 90)
    computing = asyncio.ensure_future(tiers.compute("cancelled", 140)) if when != "before it is computed" else None
    keeping = asyncio.ensure_future(tiers.compute("kept", 90))
    if when == "half way":
        await asyncio.sleep(0.003)
    elif computing is not None:
        await until(lambda: "cancelled" in tiers.receivers[0].complete)
    for receiver in tiers.receivers:
        if not receiver.loop.cancel_request("cancelled", "the client left"):
            receiver.pages.allocator.release("cancelled")  # it was whole
    for sender in tiers.senders:
        sender.loop.abort_request("cancelled", "the client left")
    if computing is not None:
        await computing
    await keeping
    await until(lambda: all("kept" in receiver.complete for receiver in tiers.receivers))
    tiers.assert_arrived("kept", 90)
    await until(lambda: all("cancelled" in sender.failed | sender.sent.keys() for sender in tiers.senders))
    await settled(tiers)


async def test_a_closed_session_fails_what_used_it_on_both_sides(tiers: ScatteredTiers) -> None:
    tiers.start("a", 100)
    session = tiers.senders[0].sessions[0]
    tiers.receivers[0].loop.close_session(session, "the writer is silent")
    tiers.senders[0].loop.close_session(session, "the watermarks ended")
    await until(lambda: "a" in tiers.senders[0].failed and "a" in tiers.receivers[0].drained)
    for receiver in tiers.receivers[1:]:
        receiver.loop.cancel_request("a", "another rank failed")
    for sender in tiers.senders:
        sender.loop.abort_request("a", "another rank failed")
    assert tiers.receivers[0].closed == [session] == tiers.senders[0].closed
    assert tiers.receivers[0].failed["a"] == ("the writer is silent", False)
    assert tiers.senders[0].failed["a"] == "the watermarks ended"
    await settled(tiers)


class CorruptedReceiver(ReceiverLoop):
    """Flip a bit of the first chunk in the ring before it is scattered, `num_flips` times."""

    num_flips = 0

    def _scatter(self, action: protocol.StartScatter) -> None:
        if self.num_flips and action.piece.chunk.index == 0:
            self.num_flips -= 1
            self._ring_memory.tensor[action.piece.grant.begin % self._ring_memory.num_bytes] ^= 1
        super()._scatter(action)


@pytest.mark.parametrize("is_one_sided", [True, False])
@pytest.mark.parametrize("num_flips", [1, 2])
async def test_a_wrong_digest_is_resent_once_and_data_loss_twice(num_flips: int, is_one_sided: bool) -> None:
    prefill, decode = Shard(page_size=16), Shard(page_size=8)
    tiers = ScatteredTiers(LAYOUT, prefill, decode, is_one_sided=is_one_sided, receiver_type=CorruptedReceiver)
    (sender,), (receiver,) = tiers.senders, tiers.receivers
    assert isinstance(receiver.loop, CorruptedReceiver)
    receiver.loop.num_flips = num_flips
    tiers.start("a", 60)
    await tiers.compute("a", 60)
    if num_flips == 1:
        await until(lambda: "a" in receiver.complete and "a" in sender.sent)
        tiers.assert_arrived("a", 60)
        assert sender.sent["a"].resends == 1
    else:
        await until(lambda: "a" in receiver.drained)
        reason, is_data_loss = receiver.failed["a"]
        assert is_data_loss and "a" not in receiver.complete
        assert reason
        sender.loop.abort_request("a", reason)
        await until(lambda: "a" in sender.failed)
    await settled(tiers)
    tiers.close()


class Unwatched(ReceiverLoop):
    def watch_sessions(self, on_closed: object, publish: object) -> None:
        """As if the owner had forgotten the call."""


async def test_a_receiver_that_nobody_watches_opens_no_session(tiers: ScatteredTiers) -> None:
    rank = ReceivingRank(tiers.receivers[0].pages, tiers.receivers[0].transport, 1 << 14, loop_type=Unwatched)
    with pytest.raises(LocalProtocolError, match="watch_sessions"):
        rank.loop.open_session(1, cast(Session, None), incarnation=1)
    rank.loop.close()


# Models whose layers differ in what they keep: full attention, two windows, a latent, recurrent states

BF16, FP8, FP32 = DType.BFLOAT16, DType.FLOAT8_E4M3, DType.FLOAT32
LENGTHS = (100, 1, 19, 20, 21, 5, 6, 48)
"""Below, at and above both windows, on chunk borders and beside them."""


@pytest.mark.parametrize(
    ("prefill", "decode", "plan", "is_one_sided"),
    [
        (
            Shard(tp_size=4, page_size=4),
            Shard(tp_size=2, page_size=8, order=TokenOrder.HND),
            ChunkPlan(chunk_tokens=8, layers_per_group=1),
            True,
        ),
        (Shard(tp_size=2, page_size=3, order=TokenOrder.HND), Shard(tp_size=3, page_size=1), ChunkPlan(chunk_tokens=7), False),
        (
            Shard(tp_size=2, page_size=4),
            Shard(tp_size=1, page_size=5, dtype=FP8),
            ChunkPlan(chunk_tokens=8, layers_per_group=3),
            False,
        ),
        (Shard(page_size=8, dtype=FP8), Shard(tp_size=2, page_size=4, dtype=FP32), ChunkPlan(chunk_tokens=30), True),
        (
            Shard(pp_size=3, page_size=4, stage_layers=(1, 3, 3)),
            Shard(pp_size=2, page_size=6, stage_layers=(5, 2)),
            ChunkPlan(chunk_tokens=8, layers_per_group=2),
            False,
        ),
    ],
    ids=["4 to 2, layer by layer", "2 to 3", "to float8", "from float8, wide chunks", "stages that lack a kind"],
)
async def test_what_decode_may_read_arrives_while_windows_pass_their_pages_on(
    prefill: Shard, decode: Shard, plan: ChunkPlan, is_one_sided: bool
) -> None:
    """Every token in reach, bit for bit, though the pages behind the windows are others' by then, and states in float32."""
    tiers = HybridTiers(prefill, decode, plan=plan, room=(100, 48, 64), new_tokens=24, is_one_sided=is_one_sided)
    await asyncio.gather(*(tiers.serve(f"r{number}", num_tokens) for number, num_tokens in enumerate(LENGTHS)))
    await until(lambda: all(len(sender.sent) == len(LENGTHS) for sender in tiers.senders))
    await until(tiers.is_idle)
    tiers.assert_nothing_is_left()
    for rank in (*tiers.senders, *tiers.receivers):
        assert rank.pages.handed_on == {"window_5", "window_20"}, "others had their pages before they were through"
    tiers.close()
