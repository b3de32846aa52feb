"""`kvferry route` as a process: its address, its signals, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node_runtime import exit_codes

ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def router_process(tmp_path: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A router of its own process, and its address; it is ended whatever happens."""
    ready = tmp_path / "ready"
    command = [sys.executable, "-m", "kvferry", "route", "--port", "0", "--ready-file", str(ready), "--log-format", "json"]
    process = subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        deadline_s = time.monotonic() + 60
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
            time.sleep(0.02)
        content = json.loads(ready.read_text())
        assert (content["role"], content["pid"]) == ("router", process.pid)
        yield process, content["http_address"]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_says_where_it_is_and_ends_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    with router_process(tmp_path, "--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2") as (process, address):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        assert opener.open(f"http://{address}/health", timeout=10).read() == b"ok\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert process.returncode == exit_codes.OK, err
        assert out == f"kvferry route: ready on http://{address}\n"
        assert not (tmp_path / "ready").exists()
        events = [json.loads(line) for line in err.splitlines()]
        assert [line["event"] for line in events if line["logger"].endswith("serve")] == ["router_ready", "draining", "stopped"]
        assert {line["role"] for line in events} == {"router"}
        assert {line["url"] for line in events if line["event"] == "server_unhealthy"} == {
            "http://127.0.0.1:1",
            "http://127.0.0.1:2",
        }


def test_a_request_that_is_cut_off_at_the_end_is_an_exit_code(tmp_path: Path) -> None:
    """Against a server that takes a connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with router_process(tmp_path, "--prefill", url, "--decode", "http://127.0.0.1:2", "--drain-timeout", "0.2") as (
            process,
            address,
        ):
            host, _, port = address.rpartition(":")
            body = b'{"prompt": "x"}'
            with socket.create_connection((host, int(port))) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                silent.settimeout(60)
                with contextlib.ExitStack() as connections:
                    is_request = False
                    while not is_request:  # else it is a health check
                        connection = connections.enter_context(silent.accept()[0])
                        connection.settimeout(60)
                        is_request = connection.recv(1 << 16).startswith(b"POST")
                    process.terminate()
                    answer = client.makefile("rb").read()
            assert b"503 Service Unavailable" in answer and b"the router has shut down" in answer
            process.communicate(timeout=20)
            assert process.returncode == exit_codes.ABORTED
