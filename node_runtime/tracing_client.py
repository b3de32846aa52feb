"""Record spans with OpenTelemetry and send them to a collector. This module is loaded only if `tracing.endpoint` is set."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

import transfer
from transfer.config import TracingConfig
from transfer.errors import ConfigError
from transfer.tracing import Span, Value, parse_traceparent

EXPORT_TIMEOUT_S: Final = 2.0
EXPORT_EVERY_S: Final = 1.0
CLOSE_S: Final = 1.0

_BATCH: Final = 256
_ATTRIBUTES: Final = "kvferry."

log = structlog.get_logger(__name__)


class _LoggedOnce(SpanExporter):
    """An exporter that logs once when its collector is away, and once when it is back. Spans that cannot be sent are lost.

    Spans that do not fit the bounded queue before it are lost, too.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                log.warning("tracing_collector_unreachable", endpoint=self._endpoint)
            self._num_lost += len(spans)
        elif self._num_lost:
            log.info("tracing_collector_recovered", endpoint=self._endpoint, spans_lost=self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OtelSpan:
    """See `transfer.tracing.Span`."""

    def __init__(self, owner: OtelTracer, span: trace.Span) -> None:
        self._owner = owner
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._num_left = owner.max_recorded
        self._num_left_out = 0
        self._is_over = False

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def begin(self, name: str, **attributes: Value) -> Span:
        return OtelSpan(self._owner, self._owner.start(name, self._context, attributes))

    def record(self, name: str, *, begun_s: float, ended_s: float, error: str = "", **attributes: Value) -> None:
        if not self._num_left:
            self._num_left_out += 1
            return
        self._num_left -= 1
        begun_ns, ended_ns = self._owner.wall_ns(begun_s), self._owner.wall_ns(ended_s)
        span = self._owner.start(name, self._context, attributes, begun_ns)
        if error:
            _fail(span, error)
        span.end(max(begun_ns, ended_ns))

    def set(self, **attributes: Value) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(_ATTRIBUTES + name, value)

    def end(self, error: str = "") -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._num_left_out:
            self.set(spans_left_out=self._num_left_out)
        if error:
            _fail(self._span, error)
        self._span.end(self._owner.wall_ns(time.monotonic()))


def _fail(span: trace.Span, error: str) -> None:
    span.set_attribute(_ATTRIBUTES + "error", error)
    span.set_status(trace.Status(trace.StatusCode.ERROR, error))


class OtelTracer:
    """See `transfer.tracing.Tracer`.

    Args:
        config: Settings of tracing.
        role: "prefill" or "decode".
        rank: Rank of the process; None in a leader.

    Raises:
        ConfigError: `tracing.ca_file` cannot be read.
    """

    def __init__(self, config: TracingConfig, *, role: str, rank: int | None = None) -> None:
        assert config.endpoint is not None
        self.max_recorded = sys.maxsize if rank is None else config.max_spans
        # All spans of the process use one clock, also if the system's clock is set meanwhile.
        # Take the largest of several differences: a pause between the two calls makes it smaller.
        self._offset_ns = max(time.time_ns() - time.monotonic_ns() for _ in range(5))
        for name in ("opentelemetry.exporter", "opentelemetry.sdk"):  # they log every failure; `_LoggedOnce` logs it once
            logging.getLogger(name).setLevel(logging.CRITICAL)
        is_plain = config.endpoint.startswith("http://")
        exporter = OTLPSpanExporter(
            endpoint=config.endpoint,
            insecure=is_plain,
            credentials=None if is_plain else _credentials(config.ca_file),
            timeout=EXPORT_TIMEOUT_S,
        )
        self._processor = BatchSpanProcessor(
            _LoggedOnce(exporter, config.endpoint),
            max_queue_size=config.max_queued_spans,
            max_export_batch_size=min(_BATCH, config.max_queued_spans),
            schedule_delay_millis=EXPORT_EVERY_S * 1e3,
        )
        process: dict[str, Any] = {
            "service.name": f"kvferry-{role}",
            "service.version": transfer.__version__,
            "host.name": os.uname().nodename,
            "process.pid": os.getpid(),
        }
        if rank is not None:
            process[f"{_ATTRIBUTES}rank"] = rank
        self._provider = TracerProvider(
            resource=Resource.create(process), sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)), shutdown_on_exit=False
        )
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kvferry", transfer.__version__)

    def begin(self, name: str, *, parent: str = "", attributes: Mapping[str, Value] | None = None) -> Span | None:
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        above = parse_traceparent(parent)
        if above is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if above.is_sampled else trace.TraceFlags.DEFAULT)
            remote = trace.SpanContext(above.trace_id, above.span_id, is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        span = self.start(name, context, attributes or {})
        return OtelSpan(self, span) if span.is_recording() else None

    def start(self, name: str, context: Any, attributes: Mapping[str, Value], begun_ns: int | None = None) -> trace.Span:
        """Start a span of OpenTelemetry."""
        named = {_ATTRIBUTES + key: value for key, value in attributes.items()}
        begun_ns = self.wall_ns(time.monotonic()) if begun_ns is None else begun_ns
        return self._tracer.start_span(name, context, attributes=named, start_time=begun_ns)

    def wall_ns(self, monotonic_s: float) -> int:
        """Return nanoseconds since 1970."""
        return round(monotonic_s * 1e9) + self._offset_ns

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export the last spans; wait at most `timeout_s` for the collector."""
        closing = threading.Thread(target=self._processor.shutdown, name="tracing-closing", daemon=True)
        closing.start()
        closing.join(timeout_s)


def _credentials(ca_file: Path | None) -> grpc.ChannelCredentials:
    try:
        return grpc.ssl_channel_credentials(None if ca_file is None else ca_file.read_bytes())
    except OSError as error:
        raise ConfigError(f"tracing.ca_file is {ca_file}, which cannot be read: {error.strerror}") from error
