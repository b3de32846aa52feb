"""Messages between a prefill leader and its ranks that `transfer.connector.messages` does not define."""

from __future__ import annotations

from dataclasses import dataclass, field

from node_runtime.rank_messages import role_codec
from transfer.config import PrefillNodeConfig
from transfer.connector.messages import (
    AttachDecode,
    CancelOutgoing,
    DecodeAttached,
    DecodeLost,
    DetachDecode,
    StartTransfer,
    TransferNotSent,
    TransferSent,
)
from transfer.control.base import MAX_PAYLOAD_BYTES
from transfer.engine_types import SamplingParams
from transfer.errors import ConfigError

TOKEN_BYTES = 5  # longest encoding of a token id below 2**32
PART_BYTES = 4 * 128 + 128  # a part of a step without its tokens: an id of 128 characters, and the names of the fields

# Leader -> rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest(StartTransfer):
    """Start a transfer and take pages for the whole prompt. The steps that compute it follow.

    Args:
        is_in_host: The prompt's KV of full attention lies in host memory.
    """

    sampling: SamplingParams
    is_in_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPrefix:
    """Load the stored beginning of a started request within `storage.get_timeout_s`.

    Every rank answers `PrefixLoaded` once. The first `RunPrefillStep` of the request determines where computing begins.

    Args:
        hashes: Hashes of the decode instance's first pages, 32 bytes each.
    """

    request_id: str
    decode_incarnation: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStepPart:
    """Tokens of one request in a step; `first_token` is the position of `token_ids[0]`."""

    request_id: str
    token_ids: tuple[int, ...] = field(repr=False)
    first_token: int
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrefillStep:
    """Compute one step. Every rank gets the same steps in the same order and answers `StepDone` or `StepFailed`."""

    step: int
    parts: tuple[PrefillStepPart, ...]


# Rank -> leader


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLoaded:
    """The first `num_tokens` tokens of the request are in this rank's pool; 0 if none could be loaded for any reason."""

    request_id: str
    num_tokens: int


CODEC = role_codec(
    AttachDecode,
    DetachDecode,
    StartRequest,
    LoadPrefix,
    RunPrefillStep,
    CancelOutgoing,
    DecodeAttached,
    DecodeLost,
    PrefixLoaded,
    TransferSent,
    TransferNotSent,
)


def check_step_fits(config: PrefillNodeConfig) -> None:
    """Check that every step fits a message to the ranks.

    Raises:
        ConfigError: The largest step does not fit; the message names the settings.
    """
    limits, chunk_tokens = config.limits, config.chunk.chunk_tokens
    tokens = max(limits.max_step_tokens, chunk_tokens)
    parts = min(tokens, limits.max_running_requests)
    step_bytes = TOKEN_BYTES * tokens + PART_BYTES * (parts + 1)
    if step_bytes > MAX_PAYLOAD_BYTES:
        raise ConfigError(
            f"limits.max_step_tokens is {limits.max_step_tokens}, limits.max_running_requests is {limits.max_running_requests} "
            f"and chunk.chunk_tokens is {chunk_tokens}: a step can take {step_bytes} bytes, and a message to the ranks takes "
            f"{MAX_PAYLOAD_BYTES}; lower them"
        )
