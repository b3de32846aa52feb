"""A real Prometheus that scrapes nodes of this machine, for as long as a test lasts."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

SCRAPE_S: Final = 0.5
JOB: Final = "kvferry"
_HOST: Final = "127.0.0.1"
_START_S: Final = 30.0
_END_S: Final = 10.0
_ANSWER_S: Final = 10.0


def program(name: str) -> str:
    """Where "prometheus" or "promtool" is; without, the test is skipped, and says how to get it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed; on Debian or Ubuntu: apt-get install --no-install-recommends prometheus")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One series of an answer: its labels and its values over time."""

    labels: Mapping[str, str]
    values: tuple[float, ...]


class Prometheus:
    """The server's HTTP API.

    Args:
        url: Where it listens.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def over(self, expr: str, begin_s: float, end_s: float) -> list[Found]:
        """What an expression gave, each second from one Unix time to another.

        Raises:
            AssertionError: Prometheus refuses the expression; the message says why.
        """
        query = urllib.parse.urlencode({"query": expr, "start": begin_s, "end": end_s, "step": 1})
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/query_range?{query}", timeout=_ANSWER_S) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expr}: {error.read().decode()}") from error
        return [
            Found(labels=series["metric"], values=tuple(float(value) for _, value in series["values"]))
            for series in found["data"]["result"]
        ]


@contextmanager
def prometheus(folder: Path, targets: Sequence[str], *, environment: Mapping[str, str]) -> Iterator[Prometheus]:
    """A server that scrapes host:port addresses; its process has ended when this ends.

    Args:
        folder: Empty; holds what it collects, and its log.
        targets: Of the job `JOB`.
        environment: Of its process; a local cluster's has it end with the cluster, at the latest.
    """
    job = {"job_name": JOB, "scrape_interval": f"{SCRAPE_S * 1000:g}ms", "static_configs": [{"targets": list(targets)}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump({"scrape_configs": [job]}), encoding="utf-8")
    # A bound socket that does not listen keeps the port from everybody but those who, as Go's listeners, set SO_REUSEADDR too.
    with socket.socket() as held, open(folder / "log", "wb") as log:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        address = f"{_HOST}:{held.getsockname()[1]}"
        command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment))
        try:
            server = Prometheus(f"http://{address}")
            _wait_until_ready(server, process, folder / "log")
            yield server
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_S)


def _wait_until_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while not server.is_ready():
        assert process.poll() is None, f"prometheus has ended: {log.read_text(encoding='utf-8')}"
        assert time.monotonic() < deadline_s, f"prometheus is not ready after {_START_S:g} s: {log.read_text(encoding='utf-8')}"
        time.sleep(0.05)
