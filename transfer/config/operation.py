"""Sections for a running node: bounds, heartbeats, restarts, breakers, the log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from transfer.breaker import BreakerSettings
from transfer.config.values import Count, CountOrZero, Host, Seconds, SecondsOrZero, Section, collector_url, listed, no_bool

MIN_HEARTBEAT_S: Final = 0.05
MAX_HEARTBEAT_S: Final = 10.0
"""Faster heartbeats are load, and slower ones notice a dead peer too late. A peer's request is clamped to the same range."""


MAX_SPECULATIVE_TOKENS: Final = 32
"""Each draft token is a row of a step. Long runs of accepted tokens are rare, so more rows cost more than they save."""

MAX_NGRAM_TOKENS: Final = 64

NgramTokens = Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MAX_NGRAM_TOKENS)]


class LimitsConfig(Section):
    """Bounds of the node's work."""

    max_queued_requests: Count = Field(default=256, description="Maximum requests in the queue. Further ones are refused.")
    max_running_requests: Count = Field(
        default=32,
        description="Maximum concurrent requests: computed, transferred or generated. The default depends on a GPU's memory.",
    )
    max_seq_len: Count | None = Field(
        default=None, description="Maximum tokens of a request, prompt and generation together. null: the model's context."
    )
    queue_timeout_s: Seconds = Field(default=60.0, description="Maximum wait of a request for room. After that it is refused.")
    step_timeout_s: Seconds = Field(
        default=600.0,
        description="Maximum time of an engine step. After that the engine counts as hung, and the ranks restart.",
    )


class PrefillLimitsConfig(LimitsConfig):
    """Bounds of a prefill node."""

    max_step_tokens: Count = Field(
        default=512, description="Maximum tokens of an engine step. On a GPU, the default depends on its memory."
    )


class DecodeLimitsConfig(LimitsConfig):
    """Bounds of a decode node."""

    prefill_retries: CountOrZero = Field(
        default=1,
        description=(
            "Retries of a request on another prefill node, if the first is lost before the first token. 0 disables retries."
        ),
    )
    join_timeout_s: SecondsOrZero = Field(
        default=10.0,
        description=(
            "Maximum wait of a request for a prefill node to join, if none is joined but one is joining, drains or does not "
            "answer. 0: refuse at once."
        ),
    )


class DraftModelConfig(Section):
    """The draft model of speculative decoding. Both tiers keep its KV."""

    model: Path | None = Field(
        default=None,
        description=(
            "Hugging Face directory of the draft model, with the tokenizer of the model. Its KV is computed and transferred with "
            "that of the model, so both tiers need the same draft model. null: none."
        ),
    )


class SpeculativeConfig(DraftModelConfig):
    """Speculative decoding: each step also computes draft tokens, and keeps those that the model itself chooses.

    The names are those of vLLM's ``--speculative-config``.
    """

    method: Literal["ngram", "draft_model"] | None = Field(
        default=None,
        description=(
            "Source of draft tokens. ngram: the tokens that followed the same tokens earlier in the request. draft_model: a "
            "smaller model (speculative.model). null: no speculative decoding."
        ),
    )
    num_speculative_tokens: Annotated[int, BeforeValidator(no_bool), Field(ge=1, le=MAX_SPECULATIVE_TOKENS)] = Field(
        default=4, description="Maximum number of draft tokens of a request in a step."
    )
    prompt_lookup_min: NgramTokens = Field(
        default=2, description="ngram: minimum number of newest tokens that must match earlier tokens of the request."
    )
    prompt_lookup_max: NgramTokens = Field(
        default=5, description="ngram: maximum number of newest tokens to compare. The newest of the longest matches is used."
    )

    @property
    def is_on(self) -> bool:
        """Whether steps can have draft tokens."""
        return self.method is not None

    @property
    def most_draft_tokens(self) -> int:
        """Maximum number of draft tokens of a request in a step."""
        return self.num_speculative_tokens if self.is_on else 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(f"method is {self.method} and model is {self.model}; set model if and only if method is draft_model")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}; it must be at most prompt_lookup_max, {self.prompt_lookup_max}"
            )
        return self


class HeartbeatConfig(Section):
    """Heartbeats on every stream. Three missed heartbeats mean a dead peer."""

    interval_s: Annotated[float, BeforeValidator(no_bool), Field(ge=MIN_HEARTBEAT_S, le=MAX_HEARTBEAT_S)] = Field(
        default=0.5,
        description="Seconds between heartbeats. A dead peer is noticed after 3 to 3.5 of them. Ranks with many sessions send "
        "fewer on sessions without requests, at least one every 10 s.",
    )


class RestartConfig(Section):
    """Restarts after the death of a rank process."""

    max_restarts: CountOrZero = Field(default=3, description="Maximum restarts of the ranks. After that the node exits.")
    backoff_s: Annotated[float, BeforeValidator(no_bool), Field(ge=0.01, le=86_400)] = Field(
        default=1.0, description="Pause before the first restart. It doubles with each further restart."
    )
    max_backoff_s: Seconds = Field(default=30.0, description="Maximum pause before a restart.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_backoff_s < self.backoff_s:
            raise ValueError(f"max_backoff_s is {self.max_backoff_s}; it must be at least backoff_s, {self.backoff_s}")
        return self


_PREFIX_TOKENS: Final = (
    "Prefer the prefill node that recently computed the same beginning of a prompt, unless it has this many more tokens "
    "outstanding."
)


class PlacementConfig(Section):
    """Choice of a prefill node: the one with the fewest outstanding prompt tokens, then the one with the fastest links."""

    prefix_tokens: CountOrZero | None = Field(default=None, description=f"{_PREFIX_TOKENS} 0 and null disable this.")


class GroupPlacementConfig(PlacementConfig):
    """Also the choice of the prefill nodes to join."""

    prefix_tokens: CountOrZero | None = Field(
        default=None, description=f"{_PREFIX_TOKENS} 0 disables this. null: 512 with a store, otherwise 0."
    )
    group_size: Count | None = Field(
        default=None,
        description=(
            "Maximum prefill nodes that a decode node joins. Each decode node chooses its own subset of those listed. null: all."
        ),
    )


class BreakerConfig(Section):
    """Breakers, which leave out a prefill node for a while if others are joined. The loss of a node opens its breaker."""

    failures: Count = Field(
        default=5, description="Failures of a prefill node within breaker.window_s that open its circuit breaker."
    )
    window_s: Seconds = Field(default=10.0, description="Seconds after which such a failure does not count any more.")
    pause_s: Seconds = Field(
        default=1.0,
        description="Seconds for which an open breaker rejects requests, before one request tests the node; doubled each time.",
    )
    max_pause_s: Seconds = Field(
        default=30.0, description="Maximum pause. After this time of success, the pause is breaker.pause_s again."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_pause_s < self.pause_s:
            raise ValueError(f"max_pause_s is {self.max_pause_s}; it must be at least pause_s, {self.pause_s}")
        return self

    def settings(self) -> BreakerSettings:
        """Return these settings as `BreakerSettings`."""
        return BreakerSettings(**dict(self))


class StatusPageConfig(Section):
    """The status page on the HTTP port, which does not know its callers."""

    enabled: bool = Field(default=True, description="Serve the status page, `/` and `/status.json`, on server.http_port.")
    request_ids: bool = Field(
        default=False,
        description="Show the clients' request ids to every client of the port. Otherwise show a random word for each.",
    )
    host_names: Annotated[tuple[Host, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "Further host names of the page, besides localhost, addresses and server.advertise_host. Other names are "
            "rejected, which prevents DNS rebinding. In the environment: separated by commas."
        ),
    )


class LogConfig(Section):
    """The node's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum log level. `debug` logs one line per chunk."
    )
    format: Literal["text", "json"] = Field(default="text", description="Format: lines for people, or one JSON object per line.")


class TracingConfig(Section):
    """Spans of requests, sent to an OpenTelemetry collector; see docs/observability.md."""

    endpoint: Annotated[str, AfterValidator(collector_url)] | None = Field(
        default=None,
        description=(
            "Target of spans: http://HOST:PORT or https://HOST:PORT of an OTLP collector's gRPC port (4317). null disables "
            "tracing. Needs kvferry[otel]."
        ),
    )
    ca_file: Path | None = Field(
        default=None, description="PEM certificates of the collector's authorities. null uses those of gRPC."
    )
    sample_ratio: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = Field(
        default=1.0,
        description="Decode: share of traced requests, among those whose client sent no traceparent.",
    )
    max_queued_spans: Count = Field(
        default=2048,
        description="Spans of a process that may wait for the collector, about 3 KiB each. Others are dropped.",
    )
    max_spans: Count = Field(
        default=64, description="Spans of parts of chunks that a rank records per request. Further spans are only counted."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ca_file is not None and (self.endpoint is None or self.endpoint.startswith("http://")):
            raise ValueError(f"ca_file is {self.ca_file} and endpoint is {self.endpoint}; it must be https://HOST:PORT for it")
        return self
