"""What a decode leader and its ranks say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rank_link import RankCodec
from node_runtime.rank_report import RankHello, RankReport, RankShutdown, RankStartFailed
from node_runtime.transfer_ids import MAX_TRANSFER_ID_BYTES
from transfer.chunk import ChunkPlan
from transfer.config import DecodeNodeConfig
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError
from transfer.instance import Link

PART_BYTES = MAX_TRANSFER_ID_BYTES + 64  # the most that a part of a step takes: an id, a token, a position, the fields' names

# Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectRequest:
    """Reserve pages for the request's whole life and let its writers ask for grants; answer `RequestExpected`.

    Args:
        reserved_tokens: Prompt and new tokens; what the pages are counted for.
        plan: How it is cut, as the prefill node said.
    """

    request_id: str
    prefill_incarnation: int
    num_tokens: int
    start_token: int
    reserved_tokens: int
    plan: ChunkPlan
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequest:
    """Give the request up, wherever it stands; answer `PagesReleased` when its pages are back."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One request's newest token, at its position."""

    request_id: str
    token_id: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """Generate one token for each; every rank gets the same steps in the same order. Rank 0 answers `StepDone`."""

    step: int
    parts: tuple[StepPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """Generation is over; answer `PagesReleased`."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetPrefill:
    """The prefill instance is gone: end its sessions."""

    incarnation: int
    reason: str


# Rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestExpected:
    """Grants may be asked for. `reason` is empty, or says why the request cannot be received here."""

    request_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferComplete:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    request_id: str
    reason: str
    is_data_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesReleased:
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """The step ran. `faults`: requests that cannot go on all the same, and why.

    In a step of several requests a fault of one is not the others'.
    """

    step: int
    tokens: dict[str, int]
    compute_s: float
    faults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFailed:
    """The engine failed; `is_fatal`: it is of no more use."""

    step: int
    request_ids: tuple[str, ...]
    reason: str
    is_fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProbed:
    """A writer told what its probe measured."""

    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLost:
    """The session with a rank of that prefill instance is closed, so no request can come from there whole.

    The prefill leader may know nothing of it: a rank that is frozen tells nobody.
    """

    incarnation: int
    prefill_rank: int
    reason: str


CODEC = RankCodec(
    ExpectRequest,
    CancelRequest,
    RunStep,
    FinishRequest,
    ForgetPrefill,
    RequestExpected,
    TransferComplete,
    TransferFailed,
    PagesReleased,
    StepDone,
    StepFailed,
    LinkProbed,
    WriterLost,
    RankHello,
    RankStartFailed,
    RankReport,
    RankShutdown,
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
