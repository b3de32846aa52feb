"""What a decode rank counts of the pieces that it scatters."""

from __future__ import annotations

from typing import Literal

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decode_node import receiver_events as protocol
from decode_node.receiver_loop import ReceiverLoop
from examples import one_process
from tests.runtime.instances import LAYOUT, until
from tests.runtime.scattered_tiers import ScatteredTiers
from transfer.layout import Shard
from transfer.metrics import RankMetrics


class FirstIsBroken(ReceiverLoop):
    """The first piece that is looked at has a flipped bit."""

    is_flipped = False

    def _scatter(self, action: protocol.StartScatter) -> None:
        if not self.is_flipped:
            self.is_flipped = True
            self._ring_memory.tensor[action.grant.begin % self._ring_memory.num_bytes] ^= 1
        super()._scatter(action)


def counts(metrics: RankMetrics) -> dict[str, float]:
    text = "".join(metrics.snapshot({})["families"].values())
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if "bucket" not in sample.name}


@pytest.mark.parametrize("is_broken", [False, True])
async def test_only_intact_pieces_count_as_transferred(is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RankMetrics] = []

    def noted(*, role: Literal["prefill", "decode"], rank: int) -> RankMetrics:
        made.append(RankMetrics(role=role, rank=rank))
        return made[-1]

    monkeypatch.setattr(one_process, "RankMetrics", noted)
    num_tokens, num_chunks = 60, 3  # chunks of 24 tokens, both layers in each
    receiver_type = FirstIsBroken if is_broken else ReceiverLoop
    tiers = ScatteredTiers(LAYOUT, Shard(page_size=16), Shard(page_size=8), is_one_sided=True, receiver_type=receiver_type)
    (receiver,) = tiers.receivers
    tiers.start("a", num_tokens)
    await tiers.compute("a", num_tokens)
    await until(lambda: "a" in receiver.complete and tiers.is_idle())
    found = counts(made[-1])
    assert found["kvferry_broken_chunks_total"] == is_broken
    assert found["kvferry_chunks_total"] == found["kvferry_stage_seconds_count"] == num_chunks
    assert found["kvferry_transferred_bytes_total"] == num_tokens * LAYOUT.num_layers * 2 * 4 * 4 * 2
    tiers.close()
