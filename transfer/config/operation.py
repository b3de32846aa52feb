"""Sections of how a node behaves while it runs: bounds, heartbeats, restarts, breakers, the log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from transfer.breaker import BreakerSettings
from transfer.config.values import Count, CountOrZero, Host, Seconds, SecondsOrZero, Section, collector_url, listed, no_bool

MIN_HEARTBEAT_S: Final = 0.05
MAX_HEARTBEAT_S: Final = 10.0
"""Faster heartbeats are load, and slower ones notice a dead peer too late; what a peer asks for is held to the same range."""


class LimitsConfig(Section):
    """Bounds of what the node takes on."""

    max_queued_requests: Count = Field(
        default=256, description="Requests that may wait, as each does at first; more are refused at once."
    )
    max_running_requests: Count = Field(default=32, description="Requests computed, transferred or generated at once.")
    max_seq_len: Count | None = Field(
        default=None, description="Tokens of a request, prompt and generation together, at most; null is the model's context."
    )
    queue_timeout_s: Seconds = Field(default=60.0, description="Longest wait for room before a request is refused.")
    step_timeout_s: Seconds = Field(
        default=600.0,
        description="An engine of which no step ends for so long is taken to hang: its ranks are started again.",
    )


class PrefillLimitsConfig(LimitsConfig):
    """Bounds that only a node which computes prompts has on top."""

    max_step_tokens: Count = Field(default=512, description="Tokens that one step of the engine computes at most.")


class DecodeLimitsConfig(LimitsConfig):
    """Bounds that only a node which has prompts computed elsewhere has on top."""

    prefill_retries: CountOrZero = Field(
        default=1,
        description=(
            "Times that a request is tried again on another prefill node, when its own is lost before its first token has been "
            "told; 0 never."
        ),
    )
    join_timeout_s: SecondsOrZero = Field(
        default=10.0,
        description=(
            "Longest that a request waits for a prefill node to be joined, where none is and one may come: it is being joined, "
            "drains or does not answer. 0: refused at once."
        ),
    )


class HeartbeatConfig(Section):
    """How a dead peer is noticed: three missed heartbeats, on every stream."""

    interval_s: Annotated[float, BeforeValidator(no_bool), Field(ge=MIN_HEARTBEAT_S, le=MAX_HEARTBEAT_S)] = Field(
        default=0.5, description="Seconds between heartbeats; a dead peer is noticed after 3 to 3.5 of them."
    )


class RestartConfig(Section):
    """What happens when a rank process dies."""

    max_restarts: CountOrZero = Field(default=3, description="Times that the ranks are started again before the node gives up.")
    backoff_s: Annotated[float, BeforeValidator(no_bool), Field(ge=0.01, le=86_400)] = Field(
        default=1.0, description="Pause before the first restart; doubled at each further one."
    )
    max_backoff_s: Seconds = Field(default=30.0, description="Longest pause before a restart.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_backoff_s < self.backoff_s:
            raise ValueError(f"max_backoff_s is {self.max_backoff_s}; it must be at least backoff_s, {self.backoff_s}")
        return self


class PlacementConfig(Section):
    """Which prefill node takes a prompt: that with the least prompt tokens outstanding, then that with the fastest links."""

    prefix_tokens: CountOrZero | None = Field(
        default=None,
        description=(
            "Prefer the prefill node that recently had the same beginning of a prompt, unless it has more than this many more "
            "tokens outstanding. 0 disables this. null: 512 with a store, otherwise 0."
        ),
    )


class BreakerConfig(Section):
    """When a prefill node is left out for a while, as long as others are joined; the loss of a node always does that."""

    failures: Count = Field(
        default=5, description="Requests that fail by a prefill node's fault, within breaker.window_s, before it is left out."
    )
    window_s: Seconds = Field(default=10.0, description="Seconds after which such a failure counts no more.")
    pause_s: Seconds = Field(
        default=1.0, description="Seconds for which a node is left out before one request tries it; doubled at each further time."
    )
    max_pause_s: Seconds = Field(
        default=30.0, description="Longest such pause; a node that has served for so long begins with breaker.pause_s again."
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
        description="Show request ids as clients chose them, to everybody who reaches the port; else a word for each.",
    )
    host_names: Annotated[tuple[Host, ...], BeforeValidator(listed)] = Field(
        default=(),
        description=(
            "Further host names of the page, besides localhost, addresses and server.advertise_host. Through any other name, a "
            "website could read it. In the environment: separated by commas."
        ),
    )


class LogConfig(Section):
    """The node's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum log level. `debug` logs one line per chunk."
    )
    format: Literal["text", "json"] = Field(default="text", description="Format: lines for people, or one JSON object per line.")


class TracingConfig(Section):
    """Spans of requests, sent to an OpenTelemetry collector; see docs/operations.md."""

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
