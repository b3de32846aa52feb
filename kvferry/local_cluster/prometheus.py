"""A Prometheus server that scrapes nodes of this machine: for the demo and for tests."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from transfer.errors import ConfigError, TransferError

SCRAPE_S: Final = 0.5
JOB: Final = "kvferry"
HOW_TO_GET_IT: Final = "on Debian or Ubuntu: apt-get install --no-install-recommends prometheus"
# No proxy between processes of one machine.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_HOST: Final = "127.0.0.1"
_START_S: Final = 30.0
_END_S: Final = 10.0
_ANSWER_S: Final = 10.0


def find_prometheus() -> str | None:
    """Return the path of the program; None if it is not installed."""
    return shutil.which("prometheus")


class Prometheus:
    """The HTTP API of a server at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def is_ready(self) -> bool:
        """Return True if it answers queries."""
        try:
            with _OPENER.open(f"{self.url}/-/ready", timeout=_ANSWER_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def asked(self, path: str) -> Any:
        """Return the data of an answer, for example of ``rules``."""
        with _OPENER.open(f"{self.url}/api/v1/{path}", timeout=_ANSWER_S) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(
    folder: Path, targets: Sequence[str] | Path, *, environment: Mapping[str, str], rules: Path | None = None
) -> Iterator[Prometheus]:
    """Run a server that scrapes `targets`, and end it with the context.

    Args:
        folder: Empty folder for its data and its log.
        targets: host:port addresses, or a file for ``file_sd_configs``, which may change.
        environment: Environment of its process. With a local cluster's it ends with the cluster, at the latest.
        rules: File of alerts, which it evaluates with each scrape.

    Raises:
        TransferError: It does not start.
        ConfigError: It is not installed.
    """
    binary = find_prometheus()
    if binary is None:
        raise ConfigError(f"prometheus is not installed; {HOW_TO_GET_IT}")
    job: dict[str, object] = {"job_name": JOB, "scrape_interval": f"{SCRAPE_S * 1000:g}ms"}
    if isinstance(targets, Path):
        job["file_sd_configs"] = [{"files": [str(targets)]}]
    else:
        job["static_configs"] = [{"targets": list(targets)}]
    config = {
        "global": {"evaluation_interval": f"{SCRAPE_S * 1000:g}ms"},
        "scrape_configs": [job],
        "rule_files": [str(rules)] if rules is not None else [],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    # A bound socket that does not listen keeps the port from programs that do not set SO_REUSEADDR, as Go's listeners do.
    with socket.socket() as held, open(folder / "log", "wb") as log:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_HOST, 0))
        address = f"{_HOST}:{held.getsockname()[1]}"
        command = [
            binary,
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
        if process.poll() is not None:
            raise TransferError(f"prometheus has ended: {log.read_text(encoding='utf-8')}")
        if time.monotonic() > deadline_s:
            raise TransferError(f"prometheus is not ready after {_START_S:g} s: {log.read_text(encoding='utf-8')}")
        time.sleep(0.05)
