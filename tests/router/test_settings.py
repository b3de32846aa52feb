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

from kvferry.__main__ import app
from kvferry.router.settings import FlowKind, RouterSettings, router_settings
from node_runtime import exit_codes
from transfer.errors import ConfigError

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
        (["--prefill", P, "--decode", "ftp://d"], "--decode is 'ftp://d'; it must begin with http://"),
        (["--prefill", P, "--decode", "http://u:p@d:1"], "it must be scheme, host, port"),
        (["--prefill", P, "--prefill", "http://P:8000/", "--decode", D], "http://p:8000 is given for --prefill twice"),
        (["--prefill", P, "--decode", D, "--decode", N], "--decode mixes grpc:// and http://"),
        (["--decode", N, "--flow", "sequential"], "--flow is sequential; it is for vLLM servers"),
        (["--decode", N], "TLS is not set up"),
        (["--prefill", P, "--decode", D, "--tls-ca", "x"], "--tls-ca is for kvferry's own nodes"),
        (["--prefill", P, "--decode", D, "--port", "65536"], "--port is 65536; it must be in [0, 65535]"),
        (["--prefill", P, "--decode", D, "--max-body", "lots"], "--max-body is 'lots'; it must be a size"),
        (["--prefill", P, "--decode", D, "--max-body-total", "1MiB"], "--max-body-total is 1048576; it must be in [8388608,"),
        (["--prefill", P, "--decode", D, "--health-interval", "nan"], "--health-interval is nan"),
        (["--decode", "grpc://127.0.0.1:1", "--insecure", "--tokenizer", "/nowhere"], "--tokenizer is /nowhere; it must be"),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: list[str], said: str) -> None:
    result = route(*arguments)
    lines = [line for line in result.stderr.splitlines() if "warning: without TLS" not in line]
    assert result.exit_code == exit_codes.BAD_INPUT, result.output
    assert len(lines) == 1 and lines[0].startswith("kvferry route: ") and said in lines[0], lines


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    from kvferry.demo.model import make_demo_model

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
    assert made.flow is FlowKind.SEQUENTIAL
    assert settings([P], [D]).flow is FlowKind.CONCURRENT
    made = settings([], ["grpc://[::1]:7003", "grpc://Host:7"])
    assert made.decode == ("grpc://[::1]:7003", "grpc://host:7")
    made = settings(["grpc://Node:7001"], [D])
    assert made.prefill == ("grpc://node:7001",)
    with pytest.raises(ConfigError, match="--decode is missing"):
        settings([P], [])
