"""Make the leader's part of the tiers from a decode node's settings; `decode_node.offload.open_rank` makes that of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from decode_node.admission import Admission
from decode_node.offload.context import FULL, TierContext
from decode_node.offload.host_tier import HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.leader import OffloadLeader
from decode_node.offload.rules import StoreRules, TierRules
from decode_node.offload.store_leader import JOBS_AT_ONCE, StoreLeader, StoreSettings
from decode_node.offload.tiered_request import DeviceIndex
from planner.memory_advice import Phase, advice_for
from transfer.config import DecodeNodeConfig
from transfer.config.storage import OffloadConfig
from transfer.connector.rank_report import RankReady
from transfer.errors import LocalProtocolError
from transfer.instance import Instance
from transfer.layer_groups import layer_groups
from transfer.metrics import NodeMetrics
from transfer.storage.client import StoreClient
from transfer.storage.envelope import HEADER_BYTES
from transfer.storage.keys import chain_seed, rounding, store_fingerprint, store_key

DIRECTORY_REFRESH_S: Final = 60.0
OBJECT_REFRESH_S: Final = 3600.0
"""See `StoreSettings`. An object store does not record use, and each page costs a request."""


def rules_of(config: OffloadConfig, *, page_size: int, pool_pages: int) -> TierRules:
    """Return the settings in pages; arguments and errors as of `TierRules`."""
    return TierRules(
        page_size=page_size,
        pool_pages=pool_pages,
        stride_pages=config.stride_pages(page_size),
        window_tokens=config.device_window,
        high_water=config.high_water,
        low_water=config.low_water,
    )


def store_rules_of(config: DecodeNodeConfig, hellos: Sequence[RankReady]) -> StoreRules | None:
    """Return the rules for running requests that use the store; None if there is no store, or a rank cannot read it.

    Raises:
        LocalProtocolError: The ranks have blocks of different sizes.
    """
    sizes = {hello.stored_block_pages for hello in hellos}
    if len(sizes) > 1:
        raise LocalProtocolError(f"the ranks have blocks of {sorted(sizes)} pages in the store; they must be equal")
    (block_pages,) = sizes
    if not block_pages:
        return None
    instance = hellos[0].instance
    group = layer_groups(instance.layout)[FULL]
    max_pages = None
    if config.storage.max_bytes is not None:
        shards = [instance.shard.at(rank) for rank in range(instance.shard.num_ranks)]
        page_bytes = sum(group.page_bytes(instance.layout, shard) for shard in shards)
        headers_bytes = HEADER_BYTES * sum(len(group.layers_of(instance.layout, shard)) for shard in shards)
        max_pages = config.storage.max_bytes // (page_bytes * block_pages + headers_bytes) * block_pages
    host_pages = min(hello.host_pages[FULL] for hello in hellos)
    return StoreRules(block_pages=block_pages, host_pages=host_pages, max_pages=max_pages)


def open_tiers(
    config: DecodeNodeConfig,
    hellos: Sequence[RankReady],
    *,
    admission: Admission,
    broadcast: Callable[[object], None],
    metrics: NodeMetrics,
    client: StoreClient | None,
) -> OffloadLeader:
    """Make the tiers of one life of a node that has host memory.

    Args:
        hellos: Self-descriptions of the ranks.
        broadcast: Sends a message to every rank.
        client: Client of the store, which is closed with the tiers. None means that there is no store.

    Raises:
        ConfigError: The pools are too small for the settings.
    """
    instance, settings = hellos[0].instance, config.offload
    layout, page_size = instance.layout, instance.shard.page_size
    groups, fingerprint = layer_groups(layout), store_fingerprint(instance)
    context = TierContext(
        rules=rules_of(settings, page_size=page_size, pool_pages=admission.pool_pages.by_group[FULL]),
        groups=groups,
        tier=HostTier([min(counts) for counts in zip(*(hello.host_pages for hello in hellos), strict=True)]),
        on_device=DeviceIndex(groups),
        admission=admission,
        jobs=Jobs(len(hellos)),
        broadcast=broadcast,
        metrics=metrics,
        advice=advice_for(Phase.FULL_HOST_MEMORY, config),
        stores=store_rules_of(config, hellos),
    )

    def seed_of(salt: str, prefill: Instance) -> bytes:
        return chain_seed(fingerprint, config.storage.salt, salt, rounding(prefill, instance))

    shards = [instance.shard.at(rank) for rank in range(instance.shard.num_ranks)]

    def keys_of(group: int, page_hash: bytes) -> list[str]:
        return [store_key(fingerprint, page_hash, group=groups[group], layout=layout, shard=one) for one in shards]

    store = None
    if client is not None:
        bounds = StoreSettings(
            fetch_timeout_s=config.storage.get_timeout_s,
            refresh_s=DIRECTORY_REFRESH_S if config.storage.directory is not None else OBJECT_REFRESH_S,
            job_bytes=config.storage.queue_bytes // (2 * JOBS_AT_ONCE),
            page_bytes=tuple(max(group.page_bytes(layout, one) for one in shards) for group in groups),
        )
        store = StoreLeader(context, client=client, keys_of=keys_of, settings=bounds)
    slack_pages = settings.window_slack_tokens(page_size) // page_size
    return OffloadLeader(context, slack_pages=slack_pages, seed_of=seed_of, store=store)
