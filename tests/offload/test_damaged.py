"""Whose KV a leader takes for damaged when a request's is."""

from __future__ import annotations

import pytest

from decode_node.offload.leader import OffloadLeader
from tests.offload.tier_contexts import PAGE, context
from tests.runtime.instances import instance

PREFILL = instance(1)


@pytest.mark.parametrize(
    ("num_tokens", "first", "is_damaged"),
    [
        pytest.param(2 * PAGE, 0, True, id="one that begins alike"),
        pytest.param(2 * PAGE, 1, False, id="another"),
        pytest.param(PAGE - 1, 0, False, id="one without a whole page"),
    ],
)
@pytest.mark.parametrize("num_damaged", [3 * PAGE, PAGE - 1], ids=["whole pages", "no whole page"])
async def test_only_those_with_a_page_in_common_are_damaged(
    num_tokens: int, first: int, is_damaged: bool, num_damaged: int
) -> None:
    where = context()
    leader = OffloadLeader(where, slack_pages=0, seed_of=lambda salt, prefill: salt.encode(), store=None)
    other = await leader.look_up(range(first, first + num_tokens), "salt", prefill=PREFILL, may_skip=True)
    place = leader.place("other", other, max_new_tokens=2 * PAGE, chunk_tokens=PAGE, may_skip=True, accepted_s=0.0)
    assert place is not None and other.chain is not None
    leader.damaged(await leader.look_up(range(num_damaged), "salt", prefill=PREFILL, may_skip=True))
    leader.begin("other")
    for token in range(PAGE):
        leader.computed("other", token)
    assert (where.on_device.source_of(other.chain.hashes[0], 0) is None) == (is_damaged and num_damaged >= PAGE)
