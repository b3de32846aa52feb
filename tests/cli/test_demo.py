"""`kvferry demo` as its users run it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from kvferry.cluster_spec import child_environment
from kvferry.demo_view import LiveView, RequestProgress
from transfer.pb import kvferry_pb2 as pb


def demo(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvferry", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=cwd, env=child_environment())


def processes_with(variable: str) -> set[int]:
    """Processes that were started with this in their environment, however far below."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.timeout(120)
def test_four_to_two_is_right_and_leaves_nothing(tmp_path: Path, demo_dir: Path) -> None:
    file = tmp_path / "report.json"
    run = demo("--model", str(demo_dir), "--max-new-tokens", "16", "--json", str(file), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["tokens_match"] is True and report["leaks"] == 0 and report["leaked"] == [] and report["failed"] == 0
    assert (report["requests"], report["generated_tokens"]) == (12, 12 * 16)
    # 4 -> 2 ranks: every decode rank has two writers; K and V of 8 layers, 12 heads of 32 fp32 elements for each token.
    assert report["links"] == 4
    assert report["bytes_moved"] == report["prompt_tokens"] * 8 * 2 * 12 * 32 * 4
    assert report["writes"] < report["writes_without_staging"] / 100
    assert 0 < report["ring_peak_bytes"] <= 64 << 20 and report["watermark_acks"] > 0
    assert 0 <= report["overlap_ratio"] <= 1 and report["transport"].startswith("ucx/")
    assert 0 < report["transfer_seconds"]["p50"] <= report["transfer_seconds"]["p99"]
    assert 0 < report["ttft_seconds"]["p50"] <= report["ttft_seconds"]["p99"]
    assert "Without staging" in run.stdout and "\x1b" not in run.stdout
    assert run.stdout.count("done:") == 12


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--transport", "inproc"), 2, "one process"),
        (("--decode-tp", "5"), 2, "5"),
    ],
)
def test_a_start_that_fails_is_one_line(
    tmp_path: Path, demo_dir: Path, arguments: tuple[str, ...], code: int, named: str
) -> None:
    model = () if "--model" in arguments else ("--model", str(demo_dir))
    run = demo(*model, *arguments, cwd=tmp_path)
    assert run.returncode == code, run.stdout + run.stderr
    assert run.stderr.count("\n") == 1 and named in run.stderr, run.stderr
    assert run.stderr.startswith(("kvferry demo: prefill-node: ", "kvferry demo: decode-node: "))


def test_interrupted_demo_leaves_nothing(tmp_path: Path, demo_dir: Path) -> None:
    value = secrets.token_hex(8)
    command = [sys.executable, "-m", "kvferry", "demo", "--model", str(demo_dir)]
    environment = child_environment() | {"STARTED_BY_TEST": value}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        while len(processes_with(f"STARTED_BY_TEST={value}")) < 5:  # itself, its guard, the reference, two leaders
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.communicate(timeout=15)[1] == b"kvferry demo: interrupted\n"
        assert process.returncode == 130
        assert processes_with(f"STARTED_BY_TEST={value}") == set()
    finally:
        process.kill()
        process.wait()


def test_live_view_shows_requests_and_fits_its_terminal() -> None:
    console = Console(width=90, height=20, force_terminal=True, color_system=None, record=True)
    view = LiveView(console)
    requests = [RequestProgress(number=n, max_new_tokens=8, token_ids=[1] * (n % 9), state="done") for n in range(1, 101)]
    requests[49].state, requests[49].text = "generating", "a [red]line[/red]\nand more"
    requests[50].state, requests[50].error = "failed", "rank 1 died"
    view.phase("100 prompts at once")
    view.watch(requests)
    view.status(pb.NodeStatus(ranks=[pb.RankStatus(rank=0, ring_capacity=1 << 20, ring_live_bytes=1 << 10)]))
    with console.capture() as captured:
        console.print(view.render())
    lines = captured.get().splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 90
    text = "\n".join(lines)
    assert "a [red]line[/red] and more" in text and "100 prompts at once" in text and "1.0 KiB" in text
    assert "90 more" in text
