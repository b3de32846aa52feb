"""A fork server that was started before the settings were known ends when the node does not start.

The fork server inherits the node's standard output, so `communicate` returns only after its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_runtime import exit_codes

NODE = [sys.executable, "-m", "decode_node", "serve"]
ROOT = Path(__file__).resolve().parents[2]


def open_node(*options: str, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | environment
    return subprocess.Popen([*NODE, *options], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_invalid_command_line_leaves_no_process() -> None:
    output, _ = open_node("--nonsense").communicate(timeout=60)
    assert "No such option: --nonsense" in output


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket_is_reported(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    node = open_node("--model", str(tmp_path), "--insecure", TMPDIR=str(deep))
    output, _ = node.communicate(timeout=60)
    assert node.returncode == exit_codes.BAD_CONFIG
    assert "AF_UNIX path too long; set TMPDIR to a shorter path" in output and "Traceback" not in output


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For sockets: pytest's own folders can have paths that are too long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_node_that_is_killed_before_its_settings_are_known_leaves_no_process(
    number: signal.Signals, tmp_path: Path, short_path: Path
) -> None:
    settings = tmp_path / "settings.fifo"
    subprocess.run(["mkfifo", settings], check=True)
    node = open_node("--config", str(settings), TMPDIR=str(short_path))  # waits for a writer
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    deadline_s = time.monotonic() + 30
    while len(pids := children.read_text().split()) < 2:  # the resource tracker and the fork server
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    node.send_signal(number)
    node.wait(60)
    has_waited = not Path(f"/proc/{pids[1]}").exists()
    output, _ = node.communicate(timeout=60)
    if number != signal.SIGKILL:
        assert (node.returncode, output, has_waited, list(short_path.iterdir())) == (exit_codes.OK, "", True, [])
