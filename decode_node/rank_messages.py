"""Messages between a decode leader and its ranks that `transfer.connector.messages` does not define."""

from __future__ import annotations

from dataclasses import dataclass

from node_runtime.rank_messages import role_codec
from transfer.config import DecodeNodeConfig
from transfer.connector.messages import (
    CancelIncoming,
    ExpectTransfer,
    ForgetPrefill,
    LinkProbed,
    PrefillRankLost,
    TransferBroken,
    TransferExpected,
    TransferWhole,
)
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError
from transfer.transfer_ids import MAX_TRANSFER_ID_BYTES

PART_BYTES = MAX_TRANSFER_ID_BYTES + 128  # upper bound of a part of a step: id, token, position, names of the fields
DRAFT_BYTES = 5  # a draft token of a part

# Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectRequest(ExpectTransfer):
    """Expect a transfer, and reserve pages for the request's whole life.

    Args:
        pages: Device pages of each group of layers.
        host_pages: Host pages of its leading entries that are not on the device, of the layers that keep every token. Those of
            the tokens before `start_token` are filled, the others get KV that arrives.
        num_stored: Leading pages that move on to the store as they arrive, in whole blocks. They and the pages after them use
            the same host pages one after another: page i arrives in ``host_pages[i % len(host_pages)]``.
    """

    pages: tuple[int, ...]
    host_pages: tuple[int, ...] = ()
    num_stored: int = 0
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepPart:
    """One request's newest token, at its position, and the draft tokens behind it.

    Args:
        token_id: None means that the previous step chooses the token, and may still run. Then there are no draft tokens.
        num_draft_tokens: Draft tokens that the ranks' draft model finds; then there are no `draft_token_ids`.
    """

    request_id: str
    token_id: int | None
    position: int
    draft_token_ids: tuple[int, ...] = ()
    num_draft_tokens: int = 0

    @property
    def num_drafts(self) -> int:
        """Draft tokens of either kind."""
        return max(len(self.draft_token_ids), self.num_draft_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDecodeStep:
    """Generate one token for each part, and one more for each draft token that is accepted.

    Every rank gets the same steps in the same order. Rank 0 answers `StepDone`. If all ranks have reported
    `RankReady.can_overlap`, the leader may send the next step while one runs.
    """

    step: int
    parts: tuple[DecodeStepPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """End a request, and answer `PagesReleased`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPageRun:
    """Adjacent entries of a request's page table in one group of layers, and a host page for each."""

    group: int
    first_entry: int
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePages:
    """Copy pages of a request into the host pool, and answer `JobDone`. The steps before have computed all their tokens."""

    job: int
    request_id: str
    runs: tuple[HostPageRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPages:
    """Copy pages from the host pool onto the device, and answer `JobDone`.

    Args:
        grow: Additional device pages of the request, of the layers that keep every token.
    """

    job: int
    request_id: str
    runs: tuple[HostPageRun, ...]
    grow: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRun:
    """Adjacent entries of page tables in one group of layers."""

    group: int
    first_entry: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPages:
    """Copy device pages of one request into the same entries of another, and answer `JobDone`. See `SavePages`."""

    job: int
    source_id: str
    request_id: str
    runs: tuple[EntryRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveBoundary:
    """Read the request's leading `boundary` pages in host memory from the next step on, and the others on the device.

    If the boundary moves up, device pages are free when the steps before are over: answer `JobDone` then.
    If it moves down, the pages are loaded already.

    Args:
        job: None means that no answer is needed.
        host_pages: Host pages of the entries between the old and the new boundary, if it moves up.
        give_back: Device pages that the request gives up.
    """

    job: int | None
    request_id: str
    boundary: int
    host_pages: tuple[int, ...] = ()
    give_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Host pages of one group, and the hash of each.

    Args:
        used_ns: When they count as used, in nanoseconds since 1970.
    """

    job: int
    group: int
    hashes: tuple[bytes, ...]
    host_pages: tuple[int, ...]
    used_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackUpPages(StoreJob):
    """Put the pages into the store, and answer `JobDone`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPages(StoreJob):
    """Fill the pages from the store, and answer `JobDone`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBlock:
    """Put the next block of a running request's host pages into the store, and read it there from the next step on.

    Answer `JobDone` when no step reads the host pages any more. If that fails, `failed` is not empty.

    Args:
        index: Number of blocks of the request before it.
    """

    job: int
    request_id: str
    index: int
    host_pages: tuple[int, ...]


# Rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKVLost:
    """A rank cannot write KV of a request to the store or read it there, so the request cannot continue."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """Report the end of a job. `failed` has the places, in its list of pages, that the store did not take or did not have."""

    job: int
    failed: tuple[int, ...] = ()


CODEC = role_codec(
    ExpectRequest,
    CancelIncoming,
    RunDecodeStep,
    FinishRequest,
    ForgetPrefill,
    SavePages,
    LoadPages,
    CopyPages,
    MoveBoundary,
    BackUpPages,
    FetchPages,
    StoreBlock,
    StoredKVLost,
    JobDone,
    TransferExpected,
    TransferWhole,
    TransferBroken,
    LinkProbed,
    PrefillRankLost,
)


def check_step_fits(config: DecodeNodeConfig) -> None:
    """Raise ConfigError if a step of all requests that may run does not fit a message to the ranks."""
    running = config.limits.max_running_requests
    part_bytes = PART_BYTES + DRAFT_BYTES * config.speculative.most_draft_tokens
    most = MAX_PAYLOAD_BYTES // part_bytes - 1  # the message's own fields are smaller than a part
    if running > most:
        raise ConfigError(
            f"limits.max_running_requests is {running}; a step of this size can take {part_bytes * (running + 1)} bytes, and a "
            f"message to the ranks takes {MAX_PAYLOAD_BYTES}: it can be at most {most}"
        )
