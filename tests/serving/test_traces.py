"""Traces of requests to the running cluster, as an OpenTelemetry collector receives them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from node_runtime.tracing_client import OtelTracer
from tests.cluster.calls import prompt
from tests.serving.conftest import Serving
from tests.tracing.collector import Received
from transfer.config import TracingConfig
from transfer.pb import kvferry_pb2 as pb
from transfer.tracing import SPANS, TRACEPARENT

pytestmark = pytest.mark.timeout(180)

CLIENT = "client.ask"
NUM_TOKENS = 300
CLOCK_NS = 5_000_000
"""Tolerance between clocks of two processes of one machine; each process reads its two clocks one after the other."""

BY_NAME = {spec.name: spec for spec in SPANS}
EVERY = set(BY_NAME) - {"kvferry.fetch", "kvferry.write"}  # only an engine fetches; over shm, gathers store into the ring


async def generate(
    serving: Serving, traceparent: str, *, new: int = 6, variant: int = 0, gives_up_after: int | None = None
) -> None:
    """Send a request with this traceparent; without the metadata if `traceparent` is empty."""
    async with serving.caller() as caller:
        ids = pb.TokenIds(ids=prompt(NUM_TOKENS, 350 + variant))  # a stored prompt would not be sent
        request = pb.GenerateRequest(token_ids=ids, max_new_tokens=new, ignore_eos=True)
        metadata = ((TRACEPARENT, traceparent),) if traceparent else None
        call = caller.stub.Generate(request, metadata=metadata, timeout=60.0)
        num_tokens = 0
        async for event in call:
            num_tokens += len(event.tokens.token_ids)
            if gives_up_after is not None and num_tokens >= gives_up_after:
                call.cancel()
                return


async def asked(serving: Serving, **how: Any) -> str:
    """Send a request as a client with its own tracer and the same collector; return the id of the trace."""
    tracer = OtelTracer(TracingConfig(endpoint=f"http://127.0.0.1:{serving.collector_port}"), role="client")
    span = tracer.begin(CLIENT)
    assert span is not None
    await generate(serving, span.traceparent, **how)
    span.end()
    await asyncio.to_thread(tracer.close, 30.0)
    return span.traceparent.split("-")[1]


def parents(spans: list[Received]) -> dict[str, Received]:
    """Return the parent of each span, by id of the span."""
    by_id = {span.span_id: span for span in spans}
    return {span.span_id: by_id[span.parent_id] for span in spans if span.parent_id}


def check_whole(spans: list[Received]) -> None:
    """Check that each span has the documented parent, process and attributes."""
    within = parents(spans)
    roots = [span for span in spans if not span.parent_id]
    assert [root.name for root in roots] == [CLIENT] and roots[0].process == "kvferry-client"
    for span in spans:
        if span.name == CLIENT:
            continue
        spec, parent = BY_NAME[span.name], within[span.span_id]
        allowed = spec.parent.split(", ") if span.name != "kvferry.generate" else [CLIENT]
        assert parent.name in allowed, f"the parent of {span.name} is {parent.name}"
        service, rank = str(span.who["service.name"]), span.who.get("kvferry.rank")
        assert (rank is not None) == spec.recorded_by.endswith("ranks"), f"{span.name} is recorded by {span.process}"
        assert "both" in spec.recorded_by or service == f"kvferry-{spec.recorded_by.split()[0]}"
        assert {name.removeprefix("kvferry.") for name in span.attributes} <= {*spec.attributes, "error"}
        assert parent.begun_ns - CLOCK_NS <= span.begun_ns <= span.ended_ns


async def test_one_trace_covers_the_client_both_leaders_and_all_ranks(serving: Serving) -> None:
    trace_id = await asked(serving)
    # A second kvferry.send: each prefill rank records this span last.
    spans = await asyncio.to_thread(serving.collector.until, trace_id, [*EVERY, CLIENT, "kvferry.send"])
    check_whole(spans)

    def of(name: str) -> list[Received]:
        return [span for span in spans if span.name == name]

    processes = {span.process for span in spans}
    assert processes == {
        "kvferry-client",
        "kvferry-decode",
        "kvferry-decode/0",
        "kvferry-prefill",
        "kvferry-prefill/0",
        "kvferry-prefill/1",
    }
    for name, number in (("generate", 1), ("try", 1), ("prefill", 1), ("compute", 1), ("queue", 2), ("send", 2), ("receive", 1)):
        assert len(of(f"kvferry.{name}")) == number, name
    pieces = 2 * -(-NUM_TOKENS // 64)  # each prefill rank sends its piece of each chunk
    for name in ("grant_wait", "gather", "scatter"):
        assert len(of(f"kvferry.{name}")) == pieces, name
    assert not of("kvferry.write"), "over shm, gathers store into the ring"
    (generated,), sent = of("kvferry.generate"), of("kvferry.send")
    assert generated.attributes["kvferry.generated_tokens"] == 6
    assert generated.attributes["kvferry.finish_reason"] == "length"
    assert not any(span.is_error for span in spans)
    for name in ("kvferry.gather", "kvferry.scatter"):
        assert sum(span.attributes["kvferry.bytes"] for span in of(name)) == sum(s.attributes["kvferry.bytes"] for s in sent)
    # For each piece of a chunk, the scatter follows the gather.
    for gather in of("kvferry.gather"):
        part = {name: gather.attributes[f"kvferry.{name}"] for name in ("chunk", "route")}
        same = [s for s in spans if part.items() <= {k.removeprefix("kvferry."): v for k, v in s.attributes.items()}.items()]
        after = next(s for s in same if s.name == "kvferry.scatter")
        assert gather.begun_ns <= gather.ended_ns and gather.begun_ns - CLOCK_NS <= after.begun_ns


async def test_a_request_without_a_sampled_traceparent_has_no_trace(serving: Serving) -> None:
    """The sample ratio of the nodes is 0. Nodes ignore an invalid traceparent, and respect the flag "not sampled"."""
    before = {span.trace_id for span in serving.collector.all()}
    not_sampled = f"00-{'a' * 32}-{'b' * 16}-00"
    for number, traceparent in enumerate(("", not_sampled, "nonsense", f"00-{'0' * 32}-{'b' * 16}-01")):
        await generate(serving, traceparent, variant=number + 1)
    trace_id = await asked(serving)  # arrives after any span of the requests above
    await asyncio.to_thread(serving.collector.until, trace_id, EVERY)
    assert {span.trace_id for span in serving.collector.all()} == before | {trace_id}


async def test_the_span_of_a_cancelled_request_records_the_reason(serving: Serving) -> None:
    trace_id = await asked(serving, new=400, gives_up_after=3)
    spans = await asyncio.to_thread(serving.collector.until, trace_id, {CLIENT, "kvferry.generate", "kvferry.try"})
    (generated,) = [span for span in spans if span.name == "kvferry.generate"]
    assert generated.is_error and generated.attributes["kvferry.error"] == "the client went away"
    assert 3 <= generated.attributes["kvferry.generated_tokens"] < 400
