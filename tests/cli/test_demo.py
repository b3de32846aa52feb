"""`kvferry demo` as its users run it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.demo.kinds import ModelKind, cached_demo_model
from kvferry.demo.model import make_demo_model
from tests.cli.demo_runs import demo

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Run:
    report: dict[str, Any]
    stdout: str


def reported(folder: Path, *arguments: str) -> Run:
    file = folder / "report.json"
    ended = demo(*arguments, "--json", str(file), cwd=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return Run(json.loads(file.read_text()), ended.stdout)


@pytest.fixture(scope="module")
def four_to_two(tmp_path_factory: pytest.TempPathFactory, demo_dir: Path) -> Run:
    return reported(tmp_path_factory.mktemp("demo"), "--model", str(demo_dir), "--requests", "6", "--max-new-tokens", "8")


def test_tokens_are_right_and_nothing_is_left(four_to_two: Run) -> None:
    report = four_to_two.report
    assert report["tokens_match"] is True and report["leaks"] == 0 and report["leaked"] == [] and report["failed"] == 0
    assert (report["requests"], report["generated_tokens"]) == (6, 6 * 8)


def test_every_byte_is_moved_once_in_few_writes(four_to_two: Run) -> None:
    report = four_to_two.report
    # 4 -> 2 ranks: every decode rank has two writers; K and V of 8 layers, 12 heads of 32 fp32 elements for each token.
    assert report["links"] == 4
    assert report["bytes_moved"] == report["prompt_tokens"] * 8 * 2 * 12 * 32 * 4
    assert report["writes"] < report["writes_without_staging"] / 100
    assert 0 < report["ring_peak_bytes"] <= 64 << 20 and report["watermark_acks"] > 0
    assert 0 <= report["overlap_ratio"] <= 1 and report["transport"] == "shm"
    assert 0 < report["transfer_seconds"]["p50"] <= report["transfer_seconds"]["p99"]
    assert 0 < report["ttft_seconds"]["p50"] <= report["ttft_seconds"]["p99"]


def test_output_that_is_no_terminal_is_plain_text(four_to_two: Run) -> None:
    stdout = four_to_two.stdout
    assert "Without staging" in stdout and "\x1b" not in stdout
    assert stdout.count("done:") == 6


def test_a_hybrid_model_moves_its_recurrent_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def make(command: list[str]) -> None:
        make_demo_model(Path(command[-1]), kind=ModelKind.HYBRID)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asyncio.run(cached_demo_model(ModelKind.HYBRID, run=make))  # in this process, which has torch already
    arguments = ("--prefill-tp", "2", "--decode-tp", "1", "--requests", "2", "--max-new-tokens", "4")
    run = reported(tmp_path, "--model-kind", ModelKind.HYBRID, *arguments)
    report = run.report
    assert report["tokens_match"] is True and report["leaks"] == 0 and report["model_kind"] == "hybrid"
    groups = {group["name"]: group for group in report["groups"]}
    state, full = groups["state"], groups["full"]
    assert state["bytes_sent"] + full["bytes_sent"] == report["bytes_moved"] and report["resends"] == 0
    assert (state["tokens_sent"], full["tokens_sent"]) == (report["requests"], report["prompt_tokens"])
    assert "what each group of layers took (hybrid)" in run.stdout
