"""Host memory of a prefill rank, for prompts that the device pool cannot hold.

The KV of all full-attention layers of such a prompt lies in host pages, from its first token to its release. Steps write it and
read it back block by block, and gathers read it. Windows and states stay on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import structlog
import torch

from planner.memory_advice import Phase, advice_for
from transfer.config import PrefillNodeConfig
from transfer.copy.kernel_choice import Kernels
from transfer.copy.piece_copier import PieceCopier
from transfer.errors import ConfigError, LocalProtocolError, MemoryPlanError
from transfer.host_memory import host_memory
from transfer.layer_groups import GroupKind
from transfer.out_of_memory import allocating
from transfer.pool.host_pool import HostPool, mixed_pool
from transfer.pool.kv_pool import KVPool
from transfer.pool.page_allocator import GroupAllocator, PageAllocator
from transfer.worker_thread import WorkerThread

FULL: Final = 0
"""Index of the group of full attention, see `transfer.layer_groups.layer_groups`."""

log = structlog.get_logger(__name__)


class HostKv:
    """The host pages of a rank and their owners; implements `transfer.send.loop.HostSource`.

    Args:
        allocator: Pages of the device pool. Prompts in host memory use it for all groups except full attention.
        kernels: See `PieceCopier`.
    """

    def __init__(self, pool: KVPool, host: HostPool, allocator: GroupAllocator, *, kernels: Kernels | None = None) -> None:
        self._host = host
        self._allocator = allocator
        self._pages = PageAllocator(host.num_pages[FULL])
        self._page_size = pool.page_size
        self._num_groups = len(pool.groups)
        self._device = pool.device
        self.copier = PieceCopier(mixed_pool(pool, host, FULL), is_source=True, kernels=kernels)
        """Prepares the pieces of these prompts."""
        self._requests: set[str] = set()

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Host pages of each group of layers."""
        return self._host.num_pages

    def status(self) -> dict[str, Any]:
        """Return the entry of the host pages for `pools` in a rank's status."""
        pages = self._pages
        return {"group": "host", "pages": pages.num_pages, "reserved": pages.num_reserved, "bound": pages.num_bound}

    def num_bytes(self, num_tokens: int) -> int:
        """Return the bytes that `num_tokens` tokens take in host memory."""
        return num_tokens * self._host.page_bytes[FULL] // self._page_size

    def is_in_host(self, request_id: str) -> bool:
        """Return whether the request's KV of full attention lies here."""
        return request_id in self._requests

    def reserve(self, request_id: str, num_tokens: int) -> bool:
        """Reserve host pages for a prompt that has already reserved its device pages. Return False if there is no room."""
        num_pages = -(-num_tokens // self._page_size)
        if not self._pages.reserve(request_id, num_pages):
            return False
        self._requests.add(request_id)
        self._allocator.full.pass_before(request_id, num_pages)
        return True

    def cover(self, request_id: str, end_token: int) -> tuple[Sequence[int], ...]:
        """Bind the missing host pages up to `end_token`. Return the request's host table in each group."""
        missing = -(-end_token // self._page_size) - len(self._pages.pages(request_id))
        if missing > 0:
            self._pages.bind(request_id, missing)
        return self.host_tables(request_id)

    def host_tables(self, request_id: str) -> tuple[Sequence[int], ...]:
        """Return the request's host table in each group. Only that of full attention has entries."""
        return (self._pages.pages(request_id), *((),) * (self._num_groups - 1))

    def tables(self, request_id: str) -> tuple[Sequence[int], ...]:
        """Return the page tables for gathers: host pages for full attention, device pages for all other groups."""
        return (self._pages.pages(request_id), *self._allocator.tables(request_id)[FULL + 1 :])

    def release(self, request_id: str) -> None:
        """Release the host pages of a request. Do nothing if it has none."""
        if request_id in self._requests:
            self._requests.discard(request_id)
            self._pages.release(request_id)

    def check_idle(self) -> None:
        """Raise LocalProtocolError if a page is not free, although no request is left."""
        if self._pages.num_bound or self._pages.num_reserved:
            raise LocalProtocolError(
                f"no request is left, but {self._pages.num_bound} host pages are still bound and "
                f"{self._pages.num_reserved} are still reserved"
            )

    def close(self) -> None:
        """Wait for the device, and unpin the memory. Call this after the last step and the last gather are queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._host.close()


async def open_host_kv(
    config: PrefillNodeConfig, engine: Any, *, allocator: GroupAllocator, engine_thread: WorkerThread, kernels: Kernels
) -> HostKv | None:
    """Return the host memory of a rank, or None without `offload`.

    Raises:
        ConfigError: The model has no full attention, the engine cannot read host memory, or the setting is below one page.
        MemoryPlanError: The host has too little free memory.
    """
    settings, pool = config.offload, engine.pool
    if not settings.is_on:
        return None
    if pool.groups[FULL].kind is not GroupKind.FULL:
        names = ", ".join(group.name for group in pool.groups)
        raise ConfigError(f"offload is set, and the model has no layers that keep every token ({names}); leave it out")
    use_host_pool = getattr(engine, "use_host_pool", None)
    if use_host_pool is None:
        raise ConfigError(
            f"offload is set, and the engine {config.engine} cannot read KV in host memory (it has no use_host_pool); "
            "leave it out"
        )
    num_pages = _num_pages(config, pool)
    counts = [num_pages if index == FULL else 0 for index in range(len(pool.groups))]
    num_bytes = num_pages * pool.groups[FULL].page_bytes(pool.layout, pool.shard)
    with allocating("allocating the host pool", device="cpu", advice=advice_for(Phase.HOST_POOL, config), num_bytes=num_bytes):
        host = HostPool(pool, num_pages=counts)
    await engine_thread.call(lambda: use_host_pool(host, block_bytes=settings.buffer_bytes))
    log.info("host_kv_memory", num_bytes=num_bytes, tokens=num_pages * pool.page_size)
    return HostKv(pool, host, allocator, kernels=kernels)


def _num_pages(config: PrefillNodeConfig, pool: KVPool) -> int:
    """Return the number of host pages of a rank that the settings ask for. Raises as `open_host_kv`."""
    settings = config.offload
    page_bytes: int = pool.groups[FULL].page_bytes(pool.layout, pool.shard)
    if settings.host_memory is not None:
        name, value, num_pages = "host_memory", f"{settings.host_memory:,}", settings.host_memory // page_bytes
    else:
        ratio = settings.host_ratio or 0.0
        name, value, num_pages = "host_ratio", f"{ratio:g}", int(ratio * pool.num_pages[FULL])
    if num_pages < 1:
        raise ConfigError(f"offload.{name} is {value}; a page of {pool.page_size} tokens takes {page_bytes:,} bytes of each rank")
    available = host_memory()[1] // pool.shard.num_ranks
    if num_pages * page_bytes > available:
        raise MemoryPlanError(
            f"offload.{name} is {value}, which takes {num_pages * page_bytes:,} bytes of host memory for each rank; "
            f"{available:,} are available to each"
        )
    return num_pages
