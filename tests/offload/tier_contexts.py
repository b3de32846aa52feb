"""The leader's knowledge of both tiers, without ranks, a loop or a store: for tests of its decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decode_node.admission import Admission, page_needs
from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostPage, HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.page_placement import place
from decode_node.offload.rules import StoreRules, TierRules
from decode_node.offload.tiered_request import DeviceIndex
from decode_node.offload.tiers import PlaceRequest, Prompt
from transfer.layer_groups import LayerGroup, PageCounts, layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec
from transfer.metrics import NodeMetrics
from transfer.storage.keys import PageHashes

PAGE = 4
WINDOW_TOKENS = 8
WINDOW = 1
FULL_SPEC = LayerSpec(num_kv_heads=1, k_head_dim=1, v_head_dim=1)
WINDOW_SPEC = LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=1, k_head_dim=1, v_head_dim=1, window_tokens=WINDOW_TOKENS)
GROUPS = layer_groups(KVLayout(layers=(FULL_SPEC, WINDOW_SPEC), dtype=DType.FLOAT16))


def tier_context(
    groups: tuple[LayerGroup, ...],
    *,
    device_pages: tuple[int, ...],
    host_pages: tuple[int, ...],
    page_size: int = PAGE,
    window_tokens: int | None = None,
    stride_pages: int = 1,
    low_water: float = 0.5,
    slack_tokens: int = 0,
    num_ranks: int = 1,
    broadcast: Callable[[object], None] = lambda message: None,
    stores: StoreRules | None = None,
) -> TierContext:
    """Return the context of a leader for these groups of layers; pages are counted by group."""
    return TierContext(
        rules=TierRules(
            page_size=page_size,
            pool_pages=device_pages[FULL],
            stride_pages=stride_pages,
            window_tokens=window_tokens,
            high_water=0.9,
            low_water=low_water,
        ),
        groups=groups,
        tier=HostTier(host_pages),
        on_device=DeviceIndex(groups),
        admission=Admission(
            pool_pages=PageCounts(device_pages), needs=page_needs(groups, page_size, slack_tokens=slack_tokens), max_running=8
        ),
        jobs=Jobs(num_ranks),
        broadcast=broadcast,
        metrics=NodeMetrics(role="decode"),
        advice="raise offload.host_memory (now 1.0 GiB)",
        stores=stores,
    )


def context(
    *,
    device_pages: int = 20,
    host_pages: int = 40,
    window_pages: int = 12,
    window_tokens: int | None = 4,
    stride_pages: int = 1,
    has_window: bool = False,
    stores: StoreRules | None = None,
) -> TierContext:
    """Return the context for a model with full attention and, if asked for, a sliding window."""
    groups = GROUPS if has_window else layer_groups(KVLayout(layers=(FULL_SPEC,), dtype=DType.FLOAT16))
    return tier_context(
        groups,
        device_pages=(device_pages, 30)[: len(groups)],
        host_pages=(host_pages, window_pages)[: len(groups)],
        window_tokens=window_tokens,
        stride_pages=stride_pages,
        stores=stores,
    )


def chain(num_tokens: int, first: int = 0) -> PageHashes:
    """Of a prompt; another first token, another prompt."""
    found = PageHashes(page_size=PAGE, seed=b"seed")
    found.extend(range(first, first + num_tokens))
    return found


def keep(where: TierContext, hashes: PageHashes, entries: range, *, group: int = FULL, is_ready: bool = True) -> list[HostPage]:
    """Those pages lie in host memory, and nobody needs them; where they are not ready somebody is filling them."""
    found = []
    for entry in entries:
        page = where.tier.take(group, hashes.hashes[entry])
        assert page is not None
        if is_ready:
            where.tier.ready(page)
            where.tier.let_go(page)
        found.append(page)
    return found


def placed(
    where: TierContext,
    name: str,
    hashes: PageHashes,
    *,
    new: int = 4,
    chunk: int = PAGE,
    may_skip: bool = True,
    accepted_s: float = 0.0,
) -> Any:
    """`place` of a whole prompt."""
    wanted = PlaceRequest(
        request_id=name,
        prompt=Prompt(token_ids=range(hashes.num_tokens), chain=hashes),
        max_new_tokens=new,
        chunk_tokens=chunk,
        may_skip=may_skip,
        accepted_s=accepted_s,
    )
    return place(where, wanted)
