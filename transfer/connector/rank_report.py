"""Reports of a rank to its leader."""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transfer.instance import Instance
from transfer.pool.page_allocator import GroupAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """A rank's memory after all permanent allocations.

    Args:
        plan: The memory plan, from `MemoryPlan.as_json`; empty if the engine makes none.
        real: Measured bytes by the name of a line of the plan.
        warnings: Lines whose measured and planned bytes differ too much.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    real: dict[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def planned(self) -> dict[str, int]:
        """Planned bytes by the name of a line."""
        return {line["name"]: line["bytes"] for line in self.plan.get("lines", ())}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReady:
    """The rank's engine is loaded, and its pool and its staging buffer or ring exist.

    Args:
        instance: The instance as this rank sees it; equal on all ranks.
        pool_pages: Pages of its pool, for each group of layers.
        max_context_tokens: Longest prompt plus generation.
        vocab_size: Token ids are below it.
        eos_token_ids: The model's end tokens.
        address: host:port of the rank's own gRPC server; empty if it has none.
        ring_bytes: Size of its ring; 0 if it has none.
        host_pages: Pages of its host pool, for each group of layers; empty if it has none.
        stored_block_pages: Pages of a block that a running request moves on to the store; 0 if it cannot.
        can_switch: Whether its engine can also serve the other role.
        can_overlap: Whether it accepts a decode step while the previous one runs.
        chunk_tokens: Tokens of a chunk, chosen by the rank; 0 means those of the leader's settings.
        min_layer_groups: Least layer groups of a full chunk; above 1 if the engine reports the layers of a running step.
    """

    rank: int
    pid: int
    instance: Instance
    pool_pages: tuple[int, ...]
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    address: str = ""
    ring_bytes: int = 0
    memory: RankMemory = field(default_factory=RankMemory)
    host_pages: tuple[int, ...] = ()
    stored_block_pages: int = 0
    can_switch: bool = False
    can_overlap: bool = False
    chunk_tokens: int = 0
    min_layer_groups: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStartFailed:
    """The rank cannot start, and the leader ends the node with `exit_code`.

    Args:
        may_pass: Whether a later attempt can succeed, for example if another process still holds memory.
    """

    rank: int
    reason: str
    exit_code: int
    may_pass: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's state and metrics, sent a few times a second while they change, and as a sign of life otherwise.

    Args:
        status: Fields of the wire contract's RankStatus by name, as plain values.
        metrics: Snapshot of the rank's registry; see transfer.metrics.
    """

    rank: int
    status: dict[str, Any] = field(default_factory=dict)
    metrics: Any = None


def process_figures() -> dict[str, int]:
    """Return the fields of RankStatus about the calling process, from /proc. A value that keeps growing is a leak.

    If no file can be opened, because connections hold all of them, only the number of open files is returned.
    """
    try:
        resident_pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return {
            "open_files": len(os.listdir("/proc/self/fd")) - 1,  # without the one that lists them
            "threads": len(os.listdir("/proc/self/task")),
            "resident_bytes": resident_pages * resource.getpagesize(),
        }
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return {"open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}


def pool_status(allocator: GroupAllocator) -> dict[str, Any]:
    """Return the fields of RankStatus about a pool: its pages by group, and all of them together."""
    by_group = allocator.by_group
    return {
        "pool_pages": sum(pages.num_pages for _, pages in by_group),
        "pool_pages_reserved": sum(pages.num_reserved for _, pages in by_group),
        "pool_pages_bound": sum(pages.num_bound for _, pages in by_group),
        "pools": [
            {"group": group.name, "pages": pages.num_pages, "reserved": pages.num_reserved, "bound": pages.num_bound}
            for group, pages in by_group
        ],
    }
