"""Simulated memory of a rank: every cell knows whose bytes it holds, who writes into it and who reads it.

A cell is `ALIGNMENT_BYTES` of a ring. The world asks for every step "may this happen now?" and the answer is an assertion, so a
protocol that lets two writers meet, or a scatter read what is not there, fails at the moment when it happens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transfer.ring import ALIGNMENT_BYTES, Grant


class WorldError(AssertionError):
    """The protocol let something happen that must never happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """Whose bytes these are."""

    request_id: str
    route: int
    chunk: int


@dataclass(slots=True)
class Cell:
    tag: Tag | None = None
    is_broken: bool = False
    writer: int | None = None  # number of the write that is landing
    receive: int | None = None  # begin of the grant whose receive is posted here
    num_readers: int = 0
    pending: int | None = None  # begin of the grant whose bytes arrived and were not scattered yet
    pending_request: str = ""


@dataclass(slots=True)
class RingMemory:
    """The ring of one life of a decode rank."""

    capacity_bytes: int
    cells: list[Cell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = [Cell() for _ in range(self.capacity_bytes // ALIGNMENT_BYTES)]

    def of(self, grant: Grant, num_bytes: int) -> list[Cell]:
        """Cells of the grant's payload; R6: there is no other place where a write could land."""
        offset = grant.begin % self.capacity_bytes
        require(
            grant.begin % ALIGNMENT_BYTES == 0 and num_bytes <= grant.end - grant.begin, f"{grant} cannot hold {num_bytes} bytes"
        )
        require(offset + num_bytes <= self.capacity_bytes, f"R6: {grant} leaves the ring of {self.capacity_bytes} bytes")
        first = offset // ALIGNMENT_BYTES
        return self.cells[first : first + -(-num_bytes // ALIGNMENT_BYTES)]

    def post(self, grant: Grant, num_bytes: int, dead: set[str]) -> None:
        for cell in self.of(grant, num_bytes):
            require(cell.receive in (None, grant.begin), f"R1: receive of {grant} posted over that of grant {cell.receive}")
            self._require_free(cell, grant, dead)
            cell.receive = grant.begin

    def settle(self, grant: Grant, num_bytes: int) -> None:
        for cell in self.of(grant, num_bytes):
            if cell.receive == grant.begin:
                cell.receive = None

    def begin_landing(self, number: int, grant: Grant, num_bytes: int, dead: set[str]) -> None:
        for cell in self.of(grant, num_bytes):
            require(cell.writer is None, f"R1: writes {cell.writer} and {number} land in one byte of {grant}")
            self._require_free(cell, grant, dead)
            cell.writer, cell.tag = number, None

    def end_landing(self, number: int, grant: Grant, num_bytes: int, tag: Tag, *, is_broken: bool) -> None:
        cells = self.of(grant, num_bytes)
        for index, cell in enumerate(cells):
            require(cell.writer == number, f"write {number} lost its cell to {cell.writer}")
            cell.writer, cell.tag = None, tag
            cell.is_broken = is_broken and index == len(cells) // 2
            cell.pending, cell.pending_request = grant.begin, tag.request_id

    def stop_landing(self, number: int) -> None:
        """The session was closed: nothing more of the write lands, and what did is worth nothing."""
        for cell in self.cells:
            if cell.writer == number:
                cell.writer, cell.tag, cell.pending = None, None, None

    def begin_scatter(self, grant: Grant, num_bytes: int, tag: Tag) -> bool:
        """Start reading; returns whether the bytes have their digest. Wrong bytes are an error unless the wire broke them."""
        cells = self.of(grant, num_bytes)
        is_intact = True
        for cell in cells:
            require(cell.writer is None, f"scatter of {grant} reads while write {cell.writer} lands")
            require(cell.tag == tag, f"scatter of {tag} finds bytes of {cell.tag}")
            is_intact = is_intact and not cell.is_broken
            cell.num_readers += 1
        return is_intact

    def end_scatter(self, grant: Grant, num_bytes: int) -> None:
        for cell in self.of(grant, num_bytes):
            cell.num_readers -= 1
            if cell.pending == grant.begin:
                cell.pending = None

    def require_idle(self) -> None:
        for index, cell in enumerate(self.cells):
            require(
                cell.writer is None and cell.receive is None and not cell.num_readers, f"cell {index} is still in use: {cell}"
            )

    def _require_free(self, cell: Cell, grant: Grant, dead: set[str]) -> None:
        require(not cell.num_readers, f"R1: {grant} is written while a scatter reads its bytes")
        is_waiting = cell.pending is not None and cell.pending != grant.begin and cell.pending_request not in dead
        require(not is_waiting, f"R1: {grant} overwrites the bytes of grant {cell.pending}, which were not scattered yet")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WorldError(what)
