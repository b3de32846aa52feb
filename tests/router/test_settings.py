"""Options of `kvferry route`: what is refused at the start, by name, and with which exit code."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from kvferry import exit_codes
from kvferry.__main__ import app
from kvferry.router.settings import FlowKind, RouterSettings, router_settings
from transfer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
P, D, N = "http://p:8000", "http://d:8000", "grpc://n:7003"


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """What a command in this process does to its logging is undone: its standard error is gone with it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def route(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["route", *arguments])


def settings(prefill: list[str], decode: list[str], **options: Any) -> RouterSettings:
    defaults: dict[str, Any] = {
        "flow": None,
        "max_body": "8MiB",
        "max_body_total": "256MiB",
        "host": "127.0.0.1",
        "port": 0,
        "retries": 2,
        "max_requests": 8,
        "connect_timeout_s": 5.0,
        "health_interval_s": 1.0,
        "lost_after_s": 30.0,
        "drain_timeout_s": 60.0,
        "tokenizer": None,
        "model_name": None,
        "ready_file": None,
    }
    return router_settings(prefill=prefill, decode=decode, **{**defaults, **options})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--decode is missing"),
        (["--prefill", P], "--decode is missing"),
        (["--decode", D], "--prefill is missing"),
        (["--prefill", "p:8000", "--decode", D], "--prefill is 'p:8000'; it must begin with http://"),
        (["--prefill", P, "--decode", "ftp://d"], "--decode is 'ftp://d'; it must begin with http://"),
        (["--prefill", P, "--decode", "http://"], "--decode is 'http://'; it must be scheme, host"),
        (["--prefill", P, "--decode", "http://d:99999"], "--decode is 'http://d:99999'; it must be like"),
        (["--prefill", P, "--decode", "http://u:p@d:1"], "it must be scheme, host, port"),
        (["--prefill", P, "--decode", "http://d:1?x=1"], "it must be scheme, host, port"),
        (["--prefill", "http://p/v1", "--decode", D], "give it without /v1"),
        (["--prefill", P, "--prefill", "http://P:8000/", "--decode", D], "http://p:8000 is given for --prefill twice"),
        (["--prefill", P, "--decode", P], "http://p:8000 is given for --prefill and --decode"),
        (["--prefill", "http://d", "--decode", "http://d:80"], "http://d:80 is given for --prefill and --decode"),
        (["--prefill", P, "--decode", D, "--decode", N], "--decode mixes grpc:// and http://"),
        (["--prefill", P, "--decode", N], "--prefill is http://p:8000; a kvferry decode node"),
        (["--prefill", P, "--prefill", N, "--decode", D], "--prefill mixes grpc:// and http://"),
        (["--prefill", N, "--decode", D, "--flow", "sequential"], "--flow is sequential; it is for vLLM prefill servers"),
        (["--prefill", "grpc://n", "--decode", D], "--prefill is 'grpc://n'; it must be grpc://host:port"),
        (["--prefill", N, "--prefill", "grpc://N:7003", "--decode", D], "n:7003 is given for --prefill twice"),
        (["--prefill", N, "--decode", N], "--prefill is grpc://n:7003; a kvferry decode node"),
        (["--decode", N, "--decode", "grpc://N:7003"], "n:7003 is given for --decode twice"),
        (["--decode", "grpc://n"], "it must be grpc://host:port"),
        (["--decode", "grpc://n:0"], "it must be grpc://host:port"),
        (["--decode", "grpc://n:7003/x"], "it must be grpc://host:port"),
        (["--decode", f"grpc://n:{'9' * 5000}"], "it must be grpc://host:port"),
        (["--decode", "grpc://unix:80"], "it must be grpc://host:port"),
        (
            ["--prefill", "grpc://::1:80", "--decode", D],
            "it must be grpc://host:port with a port from 1 to 65535, an IPv6 host in",
        ),
        (["--decode", N, "--flow", "sequential"], "--flow is sequential; it is for vLLM servers"),
        (["--decode", N], "TLS is not set up"),
        (["--decode", N, "--insecure"], "--decode is n:7003, which is no loopback address"),
        (["--prefill", P, "--decode", D, "--flow", "both"], "--flow is 'both'; it must be one of concurrent, sequential"),
        (["--prefill", P, "--decode", D, "--tokenizer", "."], "--tokenizer is .; it is for kvferry decode nodes"),
        (["--prefill", P, "--decode", D, "--model-name", "m"], "--model-name is m; it is for kvferry decode nodes"),
        (["--prefill", P, "--decode", D, "--insecure"], "--insecure is for kvferry's own nodes"),
        (["--prefill", P, "--decode", D, "--tls-ca", "x"], "--tls-ca is for kvferry's own nodes"),
        (["--prefill", P, "--decode", D, "--port", "65536"], "--port is 65536; it must be in [0, 65535]"),
        (["--prefill", P, "--decode", D, "--retries", "-1"], "--retries is -1"),
        (["--prefill", P, "--decode", D, "--max-requests", "0"], "--max-requests is 0"),
        (["--prefill", P, "--decode", D, "--max-body", "lots"], "--max-body is 'lots'; it must be a size"),
        (["--prefill", P, "--decode", D, "--max-body", "1"], "--max-body is 1; it must be in [1024,"),
        (["--prefill", P, "--decode", D, "--max-body-total", "-"], "--max-body-total is '-'; it must be a size"),
        (["--prefill", P, "--decode", D, "--max-body-total", "1MiB"], "--max-body-total is 1048576; it must be in [8388608,"),
        (["--prefill", P, "--decode", D, "--connect-timeout", "0"], "--connect-timeout is 0.0"),
        (["--prefill", P, "--decode", D, "--health-interval", "nan"], "--health-interval is nan"),
        (["--prefill", P, "--decode", D, "--health-interval", "1e-9"], "--health-interval is 1e-09; it must be at least 0.05"),
        (["--prefill", P, "--decode", D, "--drain-timeout", "-1"], "--drain-timeout is -1.0"),
        (["--prefill", P, "--decode", D, "--log-level", "loud"], "--log-level is 'loud'; it must be one of debug, info"),
        (["--prefill", P, "--decode", D, "--ready-file", "/nowhere/x", "--port", "0"], "--ready-file is /nowhere/x"),
        (["--decode", "grpc://127.0.0.1:1", "--insecure", "--tokenizer", "/nowhere"], "--tokenizer is /nowhere; it must be"),
        (["--decode", "grpc://127.0.0.1:1", "--insecure", "--tokenizer", "x" * 5000], "x; it must be a Hugging Face directory"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: list[str], said: str) -> None:
    result = route(*arguments)
    lines = [line for line in result.stderr.splitlines() if "warning: without TLS" not in line]
    assert result.exit_code == exit_codes.BAD_INPUT, result.output
    assert len(lines) == 1 and lines[0].startswith("kvferry route: ") and said in lines[0], lines


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    from kvferry.demo_model import make_demo_model

    model = make_demo_model(tmp_path / "model")
    result = route("--decode", "grpc://127.0.0.1:1", "--insecure", "--tokenizer", str(model))
    assert result.exit_code == exit_codes.BAD_INPUT and "has no chat template" in result.stderr
    (model / "tokenizer.json").write_text("{")
    result = route("--decode", "grpc://127.0.0.1:1", "--insecure", "--tokenizer", str(model))
    assert result.exit_code == exit_codes.BAD_INPUT and "no tokenizer can be loaded from it" in result.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = route("--prefill", P, "--decode", D, "--port", str(port))
    assert result.exit_code == exit_codes.BAD_INPUT
    assert f"--port is {port}: 127.0.0.1:{port} cannot be bound: Address already in use" in result.stderr


def test_urls_are_brought_to_one_form() -> None:
    made = settings(["HTTP://P:8000/", "https://p/prefix/"], ["http://[::1]:80"], flow="sequential")
    assert made.prefill == ("http://p:8000", "https://p:443/prefix") and made.decode == ("http://[::1]:80",)
    assert made.flow is FlowKind.SEQUENTIAL and not made.are_nodes
    assert settings([P], [D]).flow is FlowKind.CONCURRENT
    made = settings([], ["grpc://[::1]:7003", "grpc://Host:7"])
    assert made.are_nodes and made.decode == ("[::1]:7003", "host:7")
    made = settings(["grpc://Node:7001"], [D])
    assert made.are_prefill_nodes and not made.are_nodes and made.prefill == ("node:7001",)
    with pytest.raises(ConfigError, match="--decode is missing"):
        settings([P], [])
