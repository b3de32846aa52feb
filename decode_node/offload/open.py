"""From a decode node's settings to the leader's part of its tiers; each rank's is `decode_node.offload.open_rank`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from decode_node.admission import Admission
from decode_node.offload.context import FULL, TierContext
from decode_node.offload.device_index import DeviceIndex
from decode_node.offload.host_tier import HostTier
from decode_node.offload.jobs import Jobs
from decode_node.offload.leader import OffloadLeader
from decode_node.offload.rules import TierRules
from decode_node.offload.store_leader import JOBS_AT_ONCE, StoreLeader, StoreSettings
from decode_node.rank_messages import JobDone
from transfer.config import DecodeNodeConfig
from transfer.config.storage import OffloadConfig
from transfer.connector.rank_report import RankReady
from transfer.instance import Instance
from transfer.layer_groups import layer_groups
from transfer.metrics import NodeMetrics
from transfer.storage.client import StoreClient
from transfer.storage.keys import chain_seed, rounding, store_fingerprint, store_key

DIRECTORY_REFRESH_S: Final = 60.0
OBJECT_REFRESH_S: Final = 3600.0
"""See `StoreSettings`. An object store keeps no account of what is used, and each page costs a request."""


def rules_of(config: OffloadConfig, *, page_size: int, pool_pages: int) -> TierRules:
    """The settings in pages; arguments and errors as of `TierRules`."""
    return TierRules(
        page_size=page_size,
        pool_pages=pool_pages,
        stride_pages=config.stride_pages(page_size),
        window_tokens=config.device_window,
        high_water=config.high_water,
        low_water=config.low_water,
    )


class LeaderTiers:
    """The tiers of one life of a node that has host memory.

    Args:
        config: The node's settings.
        hellos: Self-descriptions of the ranks.
        admission: Counts device pages.
        broadcast: Sends a message to every rank.
        metrics: Metrics of the leader.
        client: Client of the store, closed with the tiers. None means that there is no store.

    Raises:
        ConfigError: The pools are too small for the settings.
    """

    def __init__(
        self,
        config: DecodeNodeConfig,
        hellos: Sequence[RankReady],
        *,
        admission: Admission,
        broadcast: Callable[[object], None],
        metrics: NodeMetrics,
        client: StoreClient | None,
    ) -> None:
        instance, settings = hellos[0].instance, config.offload
        layout, page_size = instance.layout, instance.shard.page_size
        groups, fingerprint = layer_groups(layout), store_fingerprint(instance)
        self.tier = HostTier([min(counts) for counts in zip(*(hello.host_pages for hello in hellos), strict=True)])
        self._groups = groups
        self._metrics = metrics
        self.jobs = Jobs(len(hellos))
        context = TierContext(
            rules=rules_of(settings, page_size=page_size, pool_pages=admission.pool_pages.by_group[FULL]),
            groups=groups,
            tier=self.tier,
            on_device=DeviceIndex(groups),
            admission=admission,
            jobs=self.jobs,
            broadcast=broadcast,
            metrics=metrics,
        )
        self._client = client

        def seed_of(salt: str, prefill: Instance) -> bytes:
            return chain_seed(fingerprint, config.storage.salt, salt, rounding(prefill, instance))

        store = None
        if self._client is not None:
            shards = [instance.shard.at(rank) for rank in range(instance.shard.num_ranks)]

            def keys_of(group: int, page_hash: bytes) -> list[str]:
                return [store_key(fingerprint, page_hash, group=groups[group], layout=layout, shard=one) for one in shards]

            bounds = StoreSettings(
                fetch_timeout_s=config.storage.get_timeout_s,
                refresh_s=DIRECTORY_REFRESH_S if config.storage.directory is not None else OBJECT_REFRESH_S,
                job_bytes=config.storage.queue_bytes // (2 * JOBS_AT_ONCE),
                page_bytes=tuple(max(group.page_bytes(layout, one) for one in shards) for group in groups),
            )
            store = StoreLeader(context, client=self._client, keys_of=keys_of, settings=bounds)
        self.store = store
        self.leader = OffloadLeader(
            context,
            slack_pages=settings.window_slack_tokens(page_size) // page_size,
            seed_of=seed_of,
            store=store,
        )

    def job_done(self, rank: int, message: JobDone) -> None:
        """A rank has done its part of a job.

        Raises:
            LocalProtocolError: It does not have that job; or it was the last one, no request is left, and host pages are held.
        """
        self.jobs.done(rank, message.job, message.failed)
        self.leader.check_idle()

    def show(self) -> None:
        """Set the gauges to what there is now."""
        for index, group in enumerate(self._groups):
            counts = self.tier.counts(index)
            for state, pages in (("free", counts.free), ("cached", counts.cached), ("held", counts.held)):
                self._metrics.gauge("host_pages", group=group.name, state=state).set(pages)
        self._metrics.gauge("offload_backup_queue").set(0 if self.store is None else self.store.num_queued)

    async def close(self) -> None:
        """End what is asked of the store, in bounded time."""
        if self.store is not None:
            self.store.close()
        if self._client is not None:
            await self._client.close()
