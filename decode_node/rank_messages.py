"""Messages between a decode leader and its ranks that `transfer.connector.messages` does not define."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rank_link import RankCodec
from node_runtime.rank_messages import PagesReleased, RankLogLevel, RankShutdown, RankSwitch, StepFailed
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
from transfer.connector.rank_report import RankReady, RankReport, RankStartFailed
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError
from transfer.transfer_ids import MAX_TRANSFER_ID_BYTES

PART_BYTES = MAX_TRANSFER_ID_BYTES + 64  # the most that a part of a step takes: an id, a token, a position, the fields' names

# Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectRequest(ExpectTransfer):
    """Expect a transfer, and also reserve pages for the request's whole life.

    The host pool already holds the whole pages of the tokens before `start_token`.

    Args:
        pages: What it takes of each group of layers of the device pool.
        host_pages: Where in the host pool its leading pages lie, those that are not on the device: what is there already, and
            behind that what arrives there. Of the layers that keep every token.
    """

    pages: tuple[int, ...]
    host_pages: tuple[int, ...] = ()
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepPart:
    """One request's newest token, at its position."""

    request_id: str
    token_id: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDecodeStep:
    """Generate one token for each; every rank gets the same steps in the same order. Rank 0 answers `DecodeStepDone`."""

    step: int
    parts: tuple[DecodeStepPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """Generation is over; answer `PagesReleased`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPageRun:
    """Adjacent entries of a request's page table in one group of layers, and a host page for each."""

    group: int
    first_entry: int
    host_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePages:
    """Copy pages of a request into the host pool; answer `JobDone`. Every token of them has been computed by the steps before."""

    job: int
    request_id: str
    runs: tuple[HostPageRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPages:
    """Copy pages from the host pool onto the device; answer `JobDone`.

    Args:
        grow: Device pages that the request has more from now on, of the layers that keep every token.
    """

    job: int
    request_id: str
    runs: tuple[HostPageRun, ...]
    grow: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRun:
    """Entries [first_entry, first_entry + count) of page tables in one group of layers."""

    group: int
    first_entry: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPages:
    """Copy pages that one request has on the device into the same entries of another; answer `JobDone`. As of `SavePages`."""

    job: int
    source_id: str
    request_id: str
    runs: tuple[EntryRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveBoundary:
    """From the next step on the request's leading `boundary` pages are read in host memory, the others on the device.

    Where it moves up, device pages are free once the steps before are over: answer `JobDone` then. Where it moves down, the pages
    have been loaded.

    Args:
        job: None where no answer is wanted.
        host_pages: Host pages of the entries from the present boundary on, as far as it moves up.
        give_back: Device pages that the request has less from then on.
    """

    job: int | None
    request_id: str
    boundary: int
    host_pages: tuple[int, ...] = ()
    give_back: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreJob:
    """Host pages of one group, the hash of each, and when they count as used; it travels as one of the next two.

    Args:
        used_ns: Nanoseconds since 1970.
    """

    job: int
    group: int
    hashes: tuple[bytes, ...]
    host_pages: tuple[int, ...]
    used_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackUpPages(StoreJob):
    """Put the pages into the store, each under its hash; answer `JobDone`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPages(StoreJob):
    """Fill the pages from the store; answer `JobDone`."""


# Rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """A job is over. `failed`: places in its list of pages that could not be stored or had from the store."""

    job: int
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStepDone:
    """The step ran. `faults`: requests that cannot go on all the same, and why.

    In a step of several requests a fault of one is not the others'.
    """

    step: int
    tokens: dict[str, int]
    compute_s: float
    faults: dict[str, str] = field(default_factory=dict)


CODEC = RankCodec(
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
    JobDone,
    TransferExpected,
    TransferWhole,
    TransferBroken,
    PagesReleased,
    DecodeStepDone,
    StepFailed,
    LinkProbed,
    PrefillRankLost,
    RankReady,
    RankStartFailed,
    RankReport,
    RankLogLevel,
    RankShutdown,
    RankSwitch,
)


def check_step_fits(config: DecodeNodeConfig) -> None:
    """Every step must fit a message to the ranks.

    Raises:
        ConfigError: A step of all requests that may run does not.
    """
    running = config.limits.max_running_requests
    most = MAX_PAYLOAD_BYTES // PART_BYTES - 1  # the message's own fields are smaller than a part
    if running > most:
        raise ConfigError(
            f"limits.max_running_requests is {running}; a step of so many can take {PART_BYTES * (running + 1)} bytes, and a "
            f"message to the ranks takes {MAX_PAYLOAD_BYTES}: it can be at most {most}"
        )
