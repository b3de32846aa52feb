"""KV is shared only with requests whose KV passed through the same precision, and both tiers name it alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decode_node.admission import Admission, page_needs
from decode_node.offload.leader import OffloadLeader
from decode_node.offload.open import open_tiers
from decode_node.offload.tiers import PlaceRequest, Prompt
from tests.offload.tier_contexts import keep
from tests.prefill.stored_pages import prefix_of
from tests.runtime.instances import decode_config, hello, instance
from transfer.instance import Instance
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType
from transfer.metrics import NodeMetrics

PAGE = 16
TOKENS = tuple(range(5 * PAGE + 1))


def node(incarnation: int, dtype: DType | None, *, scale: float | None = None) -> Instance:
    """Of a model in float16."""
    found = instance(incarnation)
    scales = () if scale is None else ((scale, scale),) * found.layout.num_layers
    return replace(found, shard=replace(found.shard, dtype=dtype), kv_scales=scales)


PLAIN, OTHER_PLAIN = node(11, None), node(12, None)
NARROW, OTHER_NARROW = node(13, DType.FLOAT8_E4M3), node(14, DType.FLOAT8_E4M3)
SCALED = node(15, DType.FLOAT8_E4M3, scale=0.5)
NODES = (PLAIN, OTHER_PLAIN, NARROW, OTHER_NARROW, SCALED)


def tiers_of(decode: Instance, folder: Path) -> OffloadLeader:
    config = decode_config(folder, offload={"host_memory": 1 << 20}, storage={"salt": "salt"})
    pages = PageCounts((40,))
    return open_tiers(
        config,
        (replace(hello(0, pool_pages=40), instance=decode, host_pages=(40,)),),
        admission=Admission(pool_pages=pages, needs=page_needs(layer_groups(decode.layout), PAGE), max_running=8),
        broadcast=lambda message: None,
        metrics=NodeMetrics(role="decode"),
        client=None,
    )


async def looked_up(leader: OffloadLeader, prefill: Instance) -> Prompt:
    return await leader.look_up(TOKENS, "tenant", prefill=prefill, may_skip=True)


@pytest.mark.parametrize("decode_dtype", [None, DType.FLOAT32, DType.FLOAT8_E4M3])
@pytest.mark.parametrize("prefill", [PLAIN, NARROW])
async def test_both_tiers_name_pages_alike(tmp_path: Path, prefill: Instance, decode_dtype: DType | None) -> None:
    decode = node(2, decode_dtype)
    prompt = await looked_up(tiers_of(decode, tmp_path), prefill)
    assert prompt.chain is not None and len(prompt.chain.hashes) == 5
    stored = prefix_of(TOKENS, decode, prefill=prefill, store_salt="salt", request_salt="tenant")
    assert list(stored.hashes) == prompt.chain.hashes


async def test_pages_of_an_8_bit_prefill_pool_are_not_those_of_a_wider_one(tmp_path: Path) -> None:
    leader = tiers_of(node(2, None), tmp_path)
    chains = [(await looked_up(leader, one)).chain for one in NODES]
    plain, other_plain, narrow, other_narrow, scaled = [tuple(one.hashes) for one in chains if one is not None]
    assert plain == other_plain and narrow == other_narrow
    assert not set(plain) & set(narrow) and not set(scaled) & {*plain, *narrow}


@pytest.mark.parametrize(("prefill", "num_hits"), [(PLAIN, 5), (OTHER_PLAIN, 5), (NARROW, 0), (SCALED, 0)])
async def test_host_memory_answers_requests_of_the_same_precision_only(tmp_path: Path, prefill: Instance, num_hits: int) -> None:
    tiers = tiers_of(node(2, None), tmp_path)
    first = await looked_up(tiers, PLAIN)
    assert first.chain is not None
    keep(tiers.context, first.chain, range(5))
    again = await looked_up(tiers, prefill)
    place = tiers.place(
        PlaceRequest(request_id="again", prompt=again, max_new_tokens=1, chunk_tokens=PAGE, may_skip=True, accepted_s=0.0)
    )
    assert place is not None and place.start_token == num_hits * PAGE


async def test_pages_that_are_generated_belong_to_the_chain_of_their_prompt(tmp_path: Path) -> None:
    """Decode computes them in its own type, from a prompt that was rounded."""
    leader = tiers_of(node(2, None), tmp_path)
    chains = [(await looked_up(leader, one)).chain for one in (PLAIN, NARROW)]
    generated = [one.extend(range(2 * PAGE)) for one in chains if one is not None]
    assert not set(generated[0]) & set(generated[1])
