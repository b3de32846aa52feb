"""Whole pages between a GPU's pool and pinned host memory: packed by a kernel, and copied over the link in runs of host pages.

Two lanes, a stream and a packing buffer each, take turns: while the link copies the packed pages of one, the kernel packs for the
other. A lane's stream alone orders its work. If runs are too short for a copy each, the kernel itself reads or writes the host
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from transfer.copy.launch import upload
from transfer.copy.page_kernel import LINK_PROGRAMS, Segment, SegmentCopier
from transfer.copy.page_segments import Direction, IoBackend, PagePairs, PageSegment, WorkBefore, page_runs, page_segments
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool

MIN_RUN_BYTES: Final = 256 << 10
"""Below on average a run is not worth a copy of its own: queueing one takes the host some 5 us, in which 64 GB/s carry 320 KB."""


class _Lane:
    """A stream and its packing buffer. The interpreter runs everything at once, without a stream."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self.buffer: Tensor = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, after: Any) -> None:
        """Put the following work behind `after`."""
        if self._stream is not None and after is not None:
            self._stream.wait_event(after)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        """Queue kernels and copies inside on this lane's stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def wait(self) -> None:
        """Sleep until all queued work is done. A waiting thread takes no core."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
            done.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """How the pages of one group are moved. Lists are by lane.

    Args:
        host: All host pages, uint8 [num_pages, page_bytes].
        buffer_pages: Pages that a lane's buffer holds.
        pack, unpack: Pool to a lane's buffer, and back.
        write, read: Pool to host memory by the kernel itself, and back.
    """

    host: Tensor
    buffer_pages: int
    pack: list[SegmentCopier]
    unpack: list[SegmentCopier]
    write: SegmentCopier
    read: SegmentCopier


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Pages of a move that one lane takes at once. `source` and `target` are addresses of their numbers on the device."""

    group: _Group
    lane: int
    source: int
    target: int
    num_pages: int
    runs: list[tuple[int, int]]
    host_pages: list[int]

    @property
    def has_short_runs(self) -> bool:
        """Whether copies of the runs take longer than a kernel that reads or writes the host memory."""
        return self.num_pages * self.group.host.shape[1] < MIN_RUN_BYTES * len(self.runs) and len(self.runs) > 1


class DevicePageMovement:
    """See `PageMovement`. With TRITON_INTERPRET=1 it also works on CPU tensors, for tests.

    Args:
        host: Pinned host pages.
        buffer_bytes: Size of both lanes' buffers together.
    """

    def __init__(self, pool: KVPool, host: HostPool, *, buffer_bytes: int, io_backend: IoBackend = "auto") -> None:
        self._device = pool.device
        self._io_backend = io_backend
        self._lanes = [_Lane(pool.device, buffer_bytes // 2) for _ in range(2)]
        self._groups = {
            group: self._prepared(pool, host, group)
            for group, (count, size) in enumerate(zip(host.num_pages, host.page_bytes, strict=True))
            if count and size
        }
        self._inside = [_inside_copier(pool, group) for group in range(len(pool.groups))]

    def compile(self) -> None:
        for group in self._groups.values():
            for copier in (*group.pack, *group.unpack, group.write, group.read):
                copier.compile()

    def move(self, direction: Direction, moves: Sequence[PagePairs], after: WorkBefore | None) -> None:
        with self._lanes_after(after):
            tables = [upload(_both(move), self._device) for move in moves]
            if direction is Direction.COPY:
                with self._lanes[0].queueing():
                    for move, table in zip(moves, tables, strict=True):
                        self._inside[move.group](table[0].data_ptr(), table[1].data_ptr(), len(move.source_pages))
                return
            is_save = direction is Direction.SAVE
            for batch in self._batches(moves, tables, is_save=is_save):
                with self._lanes[batch.lane].queueing():
                    (self._save if is_save else self._load)(batch)

    @contextlib.contextmanager
    def _lanes_after(self, after: WorkBefore | None) -> Iterator[None]:
        """Put both lanes behind `after`. At the end all queued work is done, also after an error."""
        for lane in self._lanes:
            lane.begin(after)
        try:
            yield
        finally:
            for lane in self._lanes:
                lane.wait()

    def _save(self, batch: _Batch) -> None:
        group = batch.group
        if self._is_direct(batch):
            group.write(batch.source, batch.target, batch.num_pages)
            return
        group.pack[batch.lane](batch.source, 0, batch.num_pages)
        for on_host, packed in self._runs(batch):
            on_host.copy_(packed, non_blocking=True)

    def _load(self, batch: _Batch) -> None:
        group = batch.group
        if self._is_direct(batch):
            group.read(batch.source, batch.target, batch.num_pages)
            return
        for on_host, packed in self._runs(batch):
            packed.copy_(on_host, non_blocking=True)
        group.unpack[batch.lane](0, batch.target, batch.num_pages)

    def _is_direct(self, batch: _Batch) -> bool:
        """Return whether the kernel itself reads or writes the host memory."""
        return batch.has_short_runs if self._io_backend == "auto" else self._io_backend == "kernel"

    def _runs(self, batch: _Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of each run of host pages, and their place in the lane's buffer."""
        size = batch.group.host.shape[1]
        buffer = self._lanes[batch.lane].buffer
        for begin, end in batch.runs:
            first = batch.host_pages[begin]
            yield batch.group.host[first : first + end - begin].view(-1), buffer[begin * size : end * size]

    def _batches(self, moves: Sequence[PagePairs], tables: Sequence[Tensor], *, is_save: bool) -> Iterator[_Batch]:
        number = 0
        for move, table in zip(moves, tables, strict=True):
            group = self._groups[move.group]
            on_host = move.target_pages if is_save else move.source_pages
            for begin in range(0, len(on_host), group.buffer_pages):
                own = on_host[begin : begin + group.buffer_pages]
                yield _Batch(
                    group=group,
                    lane=number % len(self._lanes),
                    source=table[0, begin:].data_ptr(),
                    target=table[1, begin:].data_ptr(),
                    num_pages=len(own),
                    runs=page_runs(own),
                    host_pages=own.tolist(),
                )
                number += 1

    def _prepared(self, pool: KVPool, host: HostPool, group: int) -> _Group:
        segments, size = page_segments(pool, group), host.page_bytes[group]
        buffer_pages = self._lanes[0].buffer.numel() // size
        packed = [[_to_page(one, lane.buffer.data_ptr(), size) for one in segments] for lane in self._lanes]
        part = host.device_part(group)  # a page begins with its first layer's K
        linked = [_to_page(one, part.buffer(part.layers[0], is_v=False).data_ptr(), size) for one in segments]
        there: dict[str, Any] = {"num_source_pages": pool.num_pages[group]}
        back: dict[str, Any] = {"num_target_pages": pool.num_pages[group]}
        prepared = partial(SegmentCopier, self._device)
        over_link = partial(prepared, max_programs=LINK_PROGRAMS)
        return _Group(
            host=host.pages(group),
            buffer_pages=buffer_pages,
            pack=[prepared(own, num_target_pages=buffer_pages, is_target_packed=True, **there) for own in packed],
            unpack=[prepared(_reversed(own), num_source_pages=buffer_pages, is_source_packed=True, **back) for own in packed],
            write=over_link(linked, num_target_pages=host.num_pages[group], **there),
            read=over_link(_reversed(linked), num_source_pages=host.num_pages[group], **back),
        )


def _reversed(segments: Sequence[Segment]) -> list[Segment]:
    return [one.reversed for one in segments]


def _inside_copier(pool: KVPool, group: int) -> SegmentCopier:
    """Return the copier from pages of a group to other pages of it."""
    segments = []
    for one in page_segments(pool, group):
        at, stride = one.buffer.data_ptr(), one.page_stride
        segments.append(Segment(source=at, target=at, source_stride=stride, target_stride=stride, num_bytes=one.num_bytes))
    count = pool.num_pages[group]
    return SegmentCopier(pool.device, segments, num_source_pages=count, num_target_pages=count)


def _both(move: PagePairs) -> Tensor:
    """int64 [2, pages]: source and target pages."""
    return torch.stack([torch.from_numpy(move.source_pages), torch.from_numpy(move.target_pages)])


def _to_page(segment: PageSegment, address: int, page_bytes: int) -> Segment:
    """Return a segment from the pool to pages that lie like host pages from `address` on."""
    return Segment(
        source=segment.buffer.data_ptr(),
        target=address + segment.offset_bytes,
        source_stride=segment.page_stride,
        target_stride=page_bytes,
        num_bytes=segment.num_bytes,
    )
