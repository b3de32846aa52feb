"""Spans: traceparents, the number of kept spans, sampling, and tracing that is off."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import trustme

from node_runtime.rank_setup import open_tracer
from node_runtime.tracing_client import OtelTracer
from tests.tracing.collector import Collector, listening
from transfer.config import TracingConfig
from transfer.errors import ConfigError
from transfer.tracing import TraceContext, parse_traceparent, traceparent_in

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ROOT = Path(__file__).resolve().parents[2]
GIVEN = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "is_sampled"),
    [(GIVEN, True), (f"00-{TRACE}-{SPAN}-00", False), (f"00-{TRACE}-{SPAN}-03", True), (f"cc-{TRACE}-{SPAN}-01-more", True)],
)
def test_a_traceparent_is_read(text: str, is_sampled: bool) -> None:
    assert parse_traceparent(text) == TraceContext(trace_id=int(TRACE, 16), span_id=int(SPAN, 16), is_sampled=is_sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 100_000}",
    ],
    ids=range(6),
)
def test_what_is_no_traceparent_is_as_if_it_were_not_there(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_traceparent_is_found_among_metadata() -> None:
    assert traceparent_in((("a", "b"), ("traceparent-bin", b"x"), ("traceparent", GIVEN))) == GIVEN
    assert traceparent_in((("traceparent", b"bytes"),)) == traceparent_in(()) == traceparent_in(None) == ""


@contextmanager
def tracing(**settings: object) -> Iterator[tuple[OtelTracer, Collector]]:
    """A tracer and its collector, which has everything once the tracer is closed."""
    collector = Collector()
    with listening(collector) as port:
        given = {"endpoint": f"http://127.0.0.1:{port}", **settings}
        yield OtelTracer(TracingConfig.model_validate(given), role="decode", rank=3), collector


def test_of_many_spans_the_first_are_kept_and_the_others_counted() -> None:
    with tracing(max_spans=2) as (tracer, collector):
        span = tracer.begin("kvferry.send", parent=GIVEN)
        assert span is not None
        for chunk in range(5):
            span.record("kvferry.gather", begun_s=time.monotonic(), ended_s=time.monotonic(), chunk=chunk)
        span.end("it broke")
        span.end()
        tracer.close(30.0)
        gathered = [one.attributes["kvferry.chunk"] for one in collector.all() if one.name == "kvferry.gather"]
        (sent,) = [one for one in collector.all() if one.name == "kvferry.send"]
    assert gathered == [0, 1]
    assert (sent.trace_id, sent.parent_id, sent.process) == (TRACE, SPAN, "kvferry-decode/3")
    assert sent.attributes == {"kvferry.spans_left_out": 3, "kvferry.error": "it broke"} and sent.is_error


def test_the_callers_sampling_decision_precedes_the_ratio() -> None:
    with tracing(sample_ratio=0) as (tracer, _):
        assert tracer.begin("kvferry.generate") is None
        assert tracer.begin("kvferry.generate", parent="nonsense") is None
        assert tracer.begin("kvferry.generate", parent=GIVEN) is not None
        tracer.close(30.0)
    with tracing(sample_ratio=1) as (tracer, _):
        assert tracer.begin("kvferry.generate", parent=GIVEN[:-1] + "0") is None
        assert tracer.begin("kvferry.generate") is not None
        tracer.close(30.0)


def test_closing_waits_for_a_silent_collector_no_longer_than_it_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        tracer = OtelTracer(TracingConfig(endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"), role="decode")
        span = tracer.begin("kvferry.generate")
        assert span is not None
        span.end()
        tracer.close(timeout_s=0.1)
        assert "tracing-closing" in {thread.name for thread in threading.enumerate()}, "it waited for the collector"


def test_tracing_that_is_off_is_not_loaded() -> None:
    script = (
        "import sys\n"
        "from node_runtime.rank_setup import open_tracer\n"
        "from transfer.config import TracingConfig\n"
        "assert open_tracer(TracingConfig(), role='prefill') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=ROOT)
    packages = ("transfer", "node_runtime", "prefill_node", "decode_node", "kvferry")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    loaders = [file.name for file in files if "tracing_client import" in file.read_text(encoding="utf-8")]
    assert loaders == ["rank_setup.py"], "any other import would load it, or read the setting again"


def test_without_the_extra_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "node_runtime.tracing_client", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    config = TracingConfig(endpoint="http://collector:4317")
    with pytest.raises(ConfigError, match=r"tracing.endpoint is http://collector:4317; .* install kvferry\[otel\]"):
        open_tracer(config, role="prefill")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"endpoint": "collector:4317"}, "it must be http://HOST:PORT or https://HOST:PORT"),
        ({"sample_ratio": 1.5}, "less than or equal to 1"),
        ({"endpoint": "http://collector:4317", "ca_file": "/ca"}, "ca_file is /ca"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TracingConfig.model_validate(settings)


def test_a_file_of_authorities_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = TracingConfig(endpoint="https://collector:4317", ca_file=tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match=r"tracing\.ca_file is .*ca\.crt, which cannot be read: No such file"):
        OtelTracer(config, role="decode")


def test_a_collector_with_a_certificate_is_checked(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    pair = made.private_key_pem.bytes(), b"".join(blob.bytes() for blob in made.cert_chain_pems)
    for one, is_taken in ((authority, True), (stranger, False)):
        one.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
        collector = Collector()
        with listening(collector, credentials=grpc.ssl_server_credentials([pair])) as port:
            config = TracingConfig(endpoint=f"https://127.0.0.1:{port}", ca_file=tmp_path / "ca.crt")
            tracer = OtelTracer(config, role="decode")
            span = tracer.begin("kvferry.generate")
            assert span is not None
            span.end()
            tracer.close(30.0)
        assert [one.name for one in collector.all()] == (["kvferry.generate"] if is_taken else [])


def test_a_leader_leaves_none_out() -> None:
    with listening(collector := Collector()) as port:
        tracer = OtelTracer(TracingConfig(endpoint=f"http://127.0.0.1:{port}", max_spans=1), role="decode")
        span = tracer.begin("kvferry.generate")
        assert span is not None
        for name in ("kvferry.queue", "kvferry.decode"):
            span.record(name, begun_s=1.0, ended_s=2.0)
        span.end()
        tracer.close(30.0)
    assert len(collector.all()) == 3
