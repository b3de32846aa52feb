"""Spans of a request: their names, their context between processes, and the interface for recording them.

W3C traceparent text carries a trace from process to process. A client puts it in the metadata of Generate, and an engine passes
it with the prompt that it wants. A decode leader puts it in the metadata of Prefill. Leaders put it in the messages to their
ranks that begin a request. Ranks of the two tiers do not send it to each other. If tracing is off, there is no `Tracer`, and the
only cost is a check for None. `node_runtime.tracing_client` records spans.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from transfer.piece import Piece

TRACEPARENT: Final = "traceparent"
"""The key among a call's metadata."""

Value = str | int | float | bool

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MAX_CHARS: Final = 128
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanSpec:
    """A kind of span.

    Args:
        recorded_by: The process that records it.
        parent: The span that it lies in.
        meaning: Its begin and end.
        attributes: Attributes besides `error` of a failed span.
    """

    name: str
    recorded_by: str
    parent: str
    meaning: str
    attributes: tuple[str, ...] = ()


SPANS: Final = (
    SpanSpec(
        name="kvferry.generate",
        recorded_by="decode leader",
        parent="the client's, if it sent one",
        meaning="a request, from Generate to its last token",
        attributes=(
            "request_id",
            "prompt_tokens",
            "max_new_tokens",
            "generated_tokens",
            "cached_tokens",
            "retries",
            "finish_reason",
        ),
    ),
    SpanSpec(
        name="kvferry.fetch",
        recorded_by="decode leader in an engine",
        parent="the engine's, if it passes one",
        meaning="the fetch of a prompt's KV, from the engine's call until the KV is complete or given up",
        attributes=("request_id", "prompt_tokens", "retries"),
    ),
    SpanSpec(
        name="kvferry.queue",
        recorded_by="both leaders",
        parent="kvferry.generate, kvferry.fetch, kvferry.prefill",
        meaning="until the request has room on both tiers, or is given up without room; for each attempt",
    ),
    SpanSpec(
        name="kvferry.try",
        recorded_by="decode leader",
        parent="kvferry.generate, kvferry.fetch",
        meaning="one attempt on one prefill node, from its call to the call's end",
        attributes=("transfer_id", "prefill_node"),
    ),
    SpanSpec(
        name="kvferry.decode",
        recorded_by="decode leader",
        parent="kvferry.generate",
        meaning="from the first token to the last, or until the request is given up",
    ),
    SpanSpec(
        name="kvferry.prefill",
        recorded_by="prefill leader",
        parent="kvferry.try",
        meaning="the call, as the prefill node sees it",
        attributes=("transfer_id", "prompt_tokens"),
    ),
    SpanSpec(
        name="kvferry.compute",
        recorded_by="prefill leader",
        parent="kvferry.prefill",
        meaning="from the first step of the prompt to its first token, or until the request is given up",
    ),
    SpanSpec(
        name="kvferry.send",
        recorded_by="prefill ranks",
        parent="kvferry.prefill",
        meaning="from the request's begin on this rank until all of its part is released",
        attributes=("bytes", "writes", "resends", "transfer_seconds", "exposed_seconds", "spans_left_out"),
    ),
    SpanSpec(
        name="kvferry.grant_wait",
        recorded_by="prefill ranks",
        parent="kvferry.send",
        meaning="a part of a chunk is computed, and waits for its grant's bytes, or for a staging slot",
        attributes=("chunk", "route"),
    ),
    SpanSpec(
        name="kvferry.gather",
        recorded_by="prefill ranks",
        parent="kvferry.send",
        meaning="pages to staging memory; over cuda_ipc and shm straight into the ring",
        attributes=("chunk", "route", "bytes"),
    ),
    SpanSpec(
        name="kvferry.write",
        recorded_by="prefill ranks",
        parent="kvferry.send",
        meaning="staging memory to the ring",
        attributes=("chunk", "route", "bytes"),
    ),
    SpanSpec(
        name="kvferry.receive",
        recorded_by="decode ranks",
        parent="kvferry.try",
        meaning="from the reservation until all of the KV is in the pool",
        attributes=("prompt_tokens", "spans_left_out"),
    ),
    SpanSpec(
        name="kvferry.scatter",
        recorded_by="decode ranks",
        parent="kvferry.receive",
        meaning="the ring to pages, and the digest",
        attributes=("chunk", "route", "bytes"),
    ),
)


class Span(Protocol):
    """Something that lasts, and is recorded when it ends. Owned by one thread."""

    @property
    def traceparent(self) -> str:
        """Context for spans that lie in this one, in any process."""
        ...

    def begin(self, name: str, **attributes: Value) -> Span:
        """Begin a span in this one."""
        ...

    def record(self, name: str, *, begun_s: float, ended_s: float, error: str = "", **attributes: Value) -> None:
        """Record a span in this one that is over. After a number of spans, further ones are counted and left out.

        Args:
            begun_s, ended_s: Monotonic.
            error: Reason of a failure, or empty.
        """
        ...

    def set(self, **attributes: Value) -> None: ...

    def end(self, error: str = "") -> None:
        """End the span now, with the reason of a failure if it failed. No-op after the first call."""
        ...


def record_piece(span: Span, piece: Piece, name: str, seconds: float, **attributes: Any) -> None:
    """Record, in the span of its request, a span of the piece that took `seconds` and ended now."""
    now_s = time.monotonic()
    chunk, route = piece.chunk.index, piece.route.index
    span.record(name, begun_s=now_s - seconds, ended_s=now_s, chunk=chunk, route=route, **attributes)


class Tracer(Protocol):
    """Begins spans. One for each process with tracing."""

    def begin(self, name: str, *, parent: str = "", attributes: Mapping[str, Value] | None = None) -> Span | None:
        """Begin a span in `parent`, or in a new trace. Return None if the span is not sampled."""
        ...

    def close(self) -> None:
        """Send what is left, for at most a second."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """The content of a traceparent."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(text: str) -> TraceContext | None:
    """Return the content; None for text that is invalid by the W3C recommendation (Trace Context, level 1) and is ignored."""
    match = _TRACEPARENT.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id=int(trace_id, 16), span_id=int(span_id, 16), is_sampled=bool(int(flags, 16) & _SAMPLED))


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the traceparent among a call's metadata, or an empty string."""
    for key, value in metadata or ():
        if key == TRACEPARENT and isinstance(value, str):
            return value
    return ""
