"""Make one rank's host pool and its end of the store from a decode node's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from decode_node.offload.context import FULL
from decode_node.offload.open import rules_of
from decode_node.offload.rank import OffloadRank
from decode_node.offload.running_blocks import RunningBlocks
from decode_node.offload.sizes import check_store_sizes, host_page_counts, stored_block_pages
from decode_node.offload.store_leader import JOBS_AT_ONCE
from planner.memory_advice import Phase, advice_for
from transfer.config import DecodeNodeConfig
from transfer.errors import ConfigError
from transfer.host_memory import host_memory
from transfer.layer_groups import GroupKind
from transfer.out_of_memory import allocating
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator
from transfer.rank_context import RankContext
from transfer.storage.envelope import HEADER_BYTES
from transfer.storage.open import open_store_client
from transfer.storage.pages import page_parts
from transfer.worker_thread import WorkerThread


async def open_offload_rank(
    config: DecodeNodeConfig,
    context: RankContext,
    engine: Any,
    *,
    allocator: GroupAllocator,
    engine_thread: WorkerThread,
    send: Callable[[object], None],
    on_free: Callable[[str], None],
) -> OffloadRank | None:
    """Return the rank's part of the tiers, or None without host memory for KV. Arguments as of `OffloadRank`.

    Args:
        engine: The rank's engine, loaded. With early release it must read pages in host memory, see `DecodeEngine.use_host_pool`.

    Raises:
        ConfigError: The settings do not fit the model or the engine.
        MemoryPlanError: The host has too little memory.
    """
    settings = config.offload
    if not settings.is_on:
        return None
    pool = engine.pool
    page_bytes = [group.page_bytes(pool.layout, pool.shard) for group in pool.groups]
    counts = host_page_counts(
        settings,
        pool.groups,
        page_size=pool.page_size,
        device_pages=pool.num_pages,
        page_bytes=page_bytes,
        available_bytes=host_memory()[1] // pool.shard.num_ranks,
    )
    if config.storage.is_set:
        kept = [size for size, group in zip(page_bytes, pool.groups, strict=True) if group.kind is not GroupKind.STATE]
        check_store_sizes(config.storage, page_bytes=kept, header_bytes=HEADER_BYTES, jobs_at_once=JOBS_AT_ONCE)
    rules_of(settings, page_size=pool.page_size, pool_pages=pool.num_pages[0])  # an error of a rank at start ends the node
    num_bytes = sum(count * size for count, size in zip(counts, page_bytes, strict=True))
    advice = advice_for(Phase.HOST_POOL, config)
    with allocating("allocating the host pool", device="cpu", advice=advice, num_bytes=num_bytes):
        host = HostPool(pool, num_pages=counts)
    use_host_pool = None
    if settings.device_window is not None:
        use_host_pool = getattr(engine, "use_host_pool", None)
        if use_host_pool is None:
            raise ConfigError(
                f"offload.device_window is {settings.device_window}, and the engine {config.engine} cannot read KV in host "
                "memory (it has no use_host_pool); leave it out"
            )
    store = open_store_client(config.storage, loop=context.loop, observer=context.metrics.store)
    blocks: RunningBlocks | None = None
    if use_host_pool is not None:
        options: dict[str, Any] = {"block_bytes": settings.buffer_bytes}
        if store is not None and getattr(engine, "can_read_store", False):
            options["stored"] = blocks = RunningBlocks(
                host,
                store,
                loop=context.loop,
                instance=context.instance,
                pool=pool,
                pages_per_block=_stored_block_pages(pool, counts, settings.buffer_bytes),
                num_buffers=config.storage.threads + 1,  # one is used while the threads fill the others
            )
        # On the thread of its steps. On a GPU it captures graphs, which takes seconds.
        await engine_thread.call(lambda: use_host_pool(host, **options))
    return OffloadRank(
        context,
        pool=pool,
        host=host,
        allocator=allocator,
        engine_thread=engine_thread,
        send=send,
        on_free=on_free,
        store=store,
        blocks=blocks,
        buffer_bytes=settings.buffer_bytes,
        io_backend=settings.io_backend,
    )


def _stored_block_pages(pool: KVPool, host_pages: Sequence[int], buffer_bytes: int) -> int:
    """Return the pages of a block of this rank in the store."""
    sizes: dict[int, int] = {}
    for part in page_parts(pool.groups[FULL], layout=pool.layout, shard=pool.shard):
        sizes[part.layer] = sizes.get(part.layer, 0) + part.num_bytes
    return stored_block_pages(slice_bytes=max(sizes.values()), buffer_bytes=buffer_bytes, host_pages=host_pages[FULL])
