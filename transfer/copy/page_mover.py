"""Move whole pages between the device pool and the host pool, and between places of the device pool.

`PageMover` checks a request and leaves the copies to a movement, by default the fastest one for the pool's device. All movements
agree byte for byte with `transfer.copy.torch_copy`. Triton is imported only where it is used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transfer.copy.kernel_choice import Kernels
from transfer.copy.page_segments import Direction, IoBackend, PageNumbers, PagePairs, WorkBefore
from transfer.errors import ConfigError, LayoutError
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMove:
    """Pages of one group that are copied between device and host: ``device_pages[i]`` and ``host_pages[i]``, either way.

    Fastest if host pages follow each other: such a run is one copy over the link.
    """

    group: int
    device_pages: Sequence[int]
    host_pages: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCopy:
    """Pages of one group that are copied inside the device pool, ``source_pages[i]`` to ``target_pages[i]``."""

    group: int
    source_pages: Sequence[int]
    target_pages: Sequence[int]


class PageMovement(Protocol):
    """Moves pages on a kind of device. Each call returns when the copies are done."""

    def compile(self) -> None:
        """See `PageMover.compile`."""
        ...

    def move(self, direction: Direction, moves: Sequence[PagePairs], after: WorkBefore | None) -> None:
        """Move the pages, after `after`."""
        ...


class PageMover:
    """Copies whole pages. Every call blocks until its copies are done, so call it on a thread of its own.

    One call runs at a time. To use both directions of the link at once, create two movers.

    Args:
        host: Host pages over the same layout.
        buffer_bytes: Device memory for packed pages on a GPU. Half of it holds at least one page.
        io_backend: How pages cross the host link of a GPU.
        movement: How pages are moved; None chooses the way for the pool's device.

    Raises:
        LayoutError: The pages of some buffer are not contiguous.
        ConfigError: `buffer_bytes` is too small.
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostPool,
        *,
        buffer_bytes: int,
        io_backend: IoBackend = "auto",
        movement: PageMovement | None = None,
    ) -> None:
        _check_pages_are_contiguous(pool)
        largest = max(size for size, count in zip(host.page_bytes, host.num_pages, strict=True) if count)
        if buffer_bytes < 2 * largest:
            raise ConfigError(f"buffer_bytes is {buffer_bytes}; must be at least {2 * largest}, two pages of {largest} bytes")
        self._pool = pool
        self._host = host
        self._lock = threading.Lock()
        self._movement = movement_of(pool, host, buffer_bytes, io_backend=io_backend) if movement is None else movement

    def compile(self) -> None:
        """Compile the kernels of saves and loads on a GPU, without a launch. Otherwise the first of
        each compiles, for seconds."""
        self._movement.compile()

    def save(self, moves: Sequence[PageMove], after: WorkBefore | None = None) -> int:
        """Copy device pages to host pages. Return the moved bytes.

        Args:
            moves: Each host page at most once.
            after: Work on the device that must end before, such as the step that wrote the pages.

        Raises:
            LayoutError: A page is outside its pool, or a host page is there twice.
        """
        pairs = [self._pairs(one.group, one.device_pages, one.host_pages, is_save=True) for one in moves]
        return self._run(Direction.SAVE, pairs, "host_pages", after)

    def load(self, moves: Sequence[PageMove], after: WorkBefore | None = None) -> int:
        """Copy host pages to device pages, otherwise as `save`; each device page at most once."""
        pairs = [self._pairs(one.group, one.device_pages, one.host_pages, is_save=False) for one in moves]
        return self._run(Direction.LOAD, pairs, "device_pages", after)

    def copy(self, moves: Sequence[PageCopy], after: WorkBefore | None = None) -> int:
        """Copy pages of the device pool to other pages of it. Return the moved bytes.

        Raise LayoutError if a page is outside the pool, is a target twice, or is both source and target.
        """
        pairs: list[PagePairs] = []
        for one in moves:
            num_pages = self._pool.num_pages[one.group]
            numbers = [_checked(name, getattr(one, name), num_pages) for name in ("source_pages", "target_pages")]
            pairs.append(_sorted_pairs(one.group, *numbers, key=numbers[1]))
        for group in {one.group for one in pairs}:
            sources, targets = (
                np.concatenate([getattr(one, name) for one in pairs if one.group == group])
                for name in ("source_pages", "target_pages")
            )
            both = np.intersect1d(sources, targets)
            if len(both):
                raise LayoutError(f"page {both[0]} of group {group} is both source and target")
        return self._run(Direction.COPY, pairs, "target_pages", after)

    def _pairs(self, group: int, device_pages: Sequence[int], host_pages: Sequence[int], *, is_save: bool) -> PagePairs:
        device = _checked("device_pages", device_pages, self._pool.num_pages[group])
        host = _checked("host_pages", host_pages, self._host.num_pages[group])
        source, target = (device, host) if is_save else (host, device)
        return _sorted_pairs(group, source, target, key=host)

    def _run(self, direction: Direction, pairs: Sequence[PagePairs], name: str, after: WorkBefore | None) -> int:
        pairs = [one for one in pairs if len(one.source_pages) and self._host.page_bytes[one.group]]
        for group in {one.group for one in pairs}:
            targets = np.concatenate([one.target_pages for one in pairs if one.group == group])
            if _has_one_twice(targets):
                found, counts = np.unique(targets, return_counts=True)
                raise LayoutError(f"{name} has page {found[counts > 1][0]} of group {group} twice; a target is written once")
        if pairs:
            with self._lock:
                self._movement.move(direction, pairs, after)
        return sum(len(one.source_pages) * self._host.page_bytes[one.group] for one in pairs)


def movement_of(
    pool: KVPool, host: HostPool, buffer_bytes: int, kernels: Kernels | None = None, io_backend: IoBackend = "auto"
) -> PageMovement:
    """Return the movement of an implementation. None means the fastest for the pool's device.

    Args:
        io_backend: How pages cross the host link, see `DevicePageMovement`; only Triton has a choice.
    """
    match kernels or Kernels.fastest(pool.device):
        case Kernels.TORCH:
            from transfer.copy.torch_copy import TorchPageMovement

            return TorchPageMovement(pool, host, buffer_bytes=buffer_bytes)
        case Kernels.COMPILED | Kernels.NUMPY:
            from transfer.copy.host_page_mover import HostPageMovement

            return HostPageMovement(pool, host)
        case Kernels.TRITON:
            from transfer.copy.device_page_mover import DevicePageMovement

            return DevicePageMovement(pool, host, buffer_bytes=buffer_bytes, io_backend=io_backend)


def _checked(name: str, pages: Sequence[int], num_pages: int) -> PageNumbers:
    # A call can have thousands of pages, and nothing moves before all are checked.
    numbers = (
        np.arange(pages.start, pages.stop, pages.step, dtype=np.int64)
        if isinstance(pages, range)
        else np.array(pages, dtype=np.int64)
    )
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < num_pages:
        raise LayoutError(f"{name} has pages {numbers.min()} to {numbers.max()}; the pool's are in [0, {num_pages})")
    return numbers


_SPARSE = 256  # pages of a pool for each moved page: above that, sorting is faster


def _has_one_twice(pages: PageNumbers) -> bool:
    """Return whether a page is there twice, of one page or more. Marking many pages is faster than sorting them."""
    if len(pages) * _SPARSE < pages.max():
        return len(np.unique(pages)) != len(pages)
    is_there = np.zeros(int(pages.max()) + 1, dtype=np.bool_)
    is_there[pages] = True
    return int(np.count_nonzero(is_there)) != len(pages)


def _sorted_pairs(group: int, source: PageNumbers, target: PageNumbers, *, key: PageNumbers) -> PagePairs:
    if len(source) != len(target):
        raise LayoutError(f"a move of group {group} has {len(source)} source and {len(target)} target pages; must be as many")
    order = np.argsort(key, kind="stable")
    return PagePairs(group=group, source_pages=source[order], target_pages=target[order])


def _check_pages_are_contiguous(pool: KVPool) -> None:
    for part in pool.parts:
        for layer in part.layers:
            for is_v in (False, True)[: pool.layout.layers[layer].num_buffers]:
                buffer = part.buffer(layer, is_v=is_v)
                if not buffer[0].is_contiguous():
                    raise LayoutError(
                        f"{'v' if is_v else 'k'} of layer {layer} has shape {tuple(buffer.shape)}, stride {buffer.stride()}; "
                        "pages that are moved whole must each be contiguous"
                    )
