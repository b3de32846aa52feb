"""An OTLP collector: a gRPC server that takes spans in, and lets a test look at them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A span as it came over the wire.

    Args:
        who: What its process says of itself.
        parent_id: Empty of a root.
        is_error: Its status.
    """

    who: Mapping[str, Any]
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, Any]
    is_error: bool

    @property
    def process(self) -> str:
        """Service and rank, as one word."""
        rank = self.who.get("kvferry.rank")
        return str(self.who["service.name"]) + ("" if rank is None else f"/{rank}")


class Collector(TraceServiceServicer):
    """Keeps the spans that it receives."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        found = [
            Received(
                who=_values(resource.resource.attributes),
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                name=span.name,
                begun_ns=span.start_time_unix_nano,
                ended_ns=span.end_time_unix_nano,
                attributes=_values(span.attributes),
                is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
        return ExportTraceServiceResponse()

    def all(self) -> list[Received]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Received]:
        return [span for span in self.all() if span.trace_id == trace_id]

    def until(self, trace_id: str, names: Iterable[str], *, within_s: float = 15.0) -> list[Received]:
        """The trace, once it has spans of all these names, as often as each is named, and of one with a root also all that
        others lie in."""
        ends_s = time.monotonic() + within_s
        while True:
            spans = self.trace(trace_id)
            missing = set(Counter(names) - Counter(span.name for span in spans))
            if any(not span.parent_id for span in spans):  # what is from several processes comes in any order
                missing |= {span.parent_id for span in spans if span.parent_id} - {span.span_id for span in spans}
            if not missing:
                return spans
            assert time.monotonic() < ends_s, f"after {within_s:g} s trace {trace_id} has no {missing}"
            time.sleep(0.05)


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def listening(collector: Collector, port: int = 0, credentials: grpc.ServerCredentials | None = None) -> Iterator[int]:
    """Takes spans in on that port of the loopback device, or on a free one; yields which. With credentials by TLS."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_TraceServiceServicer_to_server(collector, server)
    where = f"127.0.0.1:{port}"
    bound = server.add_insecure_port(where) if credentials is None else server.add_secure_port(where, credentials)
    server.start()
    try:
        yield bound
    finally:
        server.stop(grace=0).wait(5)
