"""A fork server that was started before the settings were known ends when the node does not start.

The fork server inherits the node's standard output, so `communicate` returns only after its end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

NODE = [sys.executable, "-m", "decode_node", "serve"]
ROOT = Path(__file__).resolve().parents[2]


def open_node(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*NODE, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_invalid_command_line_leaves_no_process() -> None:
    output, _ = open_node("--nonsense").communicate(timeout=60)
    assert "No such option: --nonsense" in output


def test_a_node_that_is_killed_before_its_settings_are_known_leaves_no_process(tmp_path: Path) -> None:
    settings = tmp_path / "settings.fifo"
    subprocess.run(["mkfifo", settings], check=True)
    node = open_node("--config", str(settings))  # waits for a writer
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children")
    deadline_s = time.monotonic() + 30
    while len(children.read_text().split()) < 2:  # the fork server and the resource tracker
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    node.kill()
    node.communicate(timeout=60)
