"""`kvferry demo` as its users run it: starts that fail, an interruption, a sliding window, and a store that two runs share."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.demo.kinds import ModelKind
from kvferry.local_cluster.spec import child_environment
from tests.cli.demo_runs import demo


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


def sessions_of(pids: set[int]) -> set[int]:
    """Sessions of the processes of these that still run."""
    found = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getsid(pid))
    return found


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("--decode-tp", "5"), 2, "5"),
    ],
)
def test_a_start_that_fails_is_one_line(tmp_path: Path, model: Path, arguments: tuple[str, ...], code: int, named: str) -> None:
    run = demo("--model", str(model), *arguments, cwd=tmp_path)
    assert run.returncode == code, run.stdout + run.stderr
    assert run.stderr.count("\n") == 1 and named in run.stderr, run.stderr
    assert run.stderr.startswith(("kvferry demo: prefill-node: ", "kvferry demo: decode-node: "))


def test_interrupted_demo_leaves_nothing(tmp_path: Path, model: Path) -> None:
    value = secrets.token_hex(8)
    command = [sys.executable, "-m", "kvferry", "demo", "--model", str(model)]
    environment = child_environment() | {"STARTED_BY_TEST": value}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        # Its guard, the fork server, the reference and two leaders. Each has left the demo's session, so the signal does not
        # reach it.
        while len(sessions_of(processes_with(f"STARTED_BY_TEST={value}")) - {process.pid}) < 5:
            assert process.poll() is None
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.communicate(timeout=60)[1] == b"kvferry demo: interrupted\n"
        assert process.returncode == 130
        assert processes_with(f"STARTED_BY_TEST={value}") == set()
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(120)
def test_demo_of_a_kind_counts_what_travelled(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    cut = ("--prefill-tp", "2", "--decode-tp", "1", "--decode-order", "HND", "--max-new-tokens", "16")
    run = demo("--model-kind", ModelKind.SLIDING, *cut, "--json", str(file), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["tokens_match"] is True and report["leaks"] == 0 and report["model_kind"] == "sliding"
    full, window = report["groups"]
    assert full["bytes_sent"] + window["bytes_sent"] == report["bytes_moved"] and report["resends"] == 0
    assert window["tokens_sent"] + window["tokens_left_out"] == full["tokens_sent"] == report["prompt_tokens"]
    assert window["tokens_left_out"] > window["tokens_sent"]
    for tier in ("prefill", "decode"):
        assert window[f"{tier}_pages_used"] > 1.5 * window[f"{tier}_pages"], "the window's pages were not used again"
    assert report["writes_without_staging"] == (2 * full["tokens_sent"] + 6 * window["tokens_sent"]) * 2 * report["links"]
    assert "what each group of layers took (sliding)" in run.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "method"), [(ModelKind.SLIDING, "ngram"), (ModelKind.LLAMA, "draft_model")])
def test_speculative_decoding_over_two_ranks(tmp_path: Path, kind: ModelKind, method: str) -> None:
    """Both ranks compute the same draft tokens, and windows have pages for them. The draft model is the model itself."""
    file = tmp_path / "report.json"
    shape = ("--prefill-tp", "1", "--decode-tp", "2", "--decode-page-size", "4", "--max-new-tokens", "64")
    run = demo("--model-kind", kind, "--speculative", method, *shape, "--json", str(file), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["tokens_match"] is True and report["leaks"] == 0
    if method == "ngram":
        assert report["draft_tokens"] > report["accepted_tokens"] > 0, "the model's text hardly repeats"
    else:
        assert report["draft_tokens"] == report["accepted_tokens"] > 0.7 * report["generated_tokens"]
    assert "draft tokens accepted" in run.stdout


@pytest.mark.timeout(120)
def test_prompts_that_the_prefill_devices_cannot_hold(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    shape = ("--prefill-tp", "2", "--decode-tp", "1", "--prefill-order", "HND", "--max-new-tokens", "8")
    run = demo("--model-kind", ModelKind.SLIDING, "--prefill-offload", *shape, "--json", str(file), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["tokens_match"] is True and report["leaks"] == 0 and report["resends"] == 0
    offload = report["prefill_offload"]
    assert offload["longest_prompt_tokens"] > 3 * offload["device_tokens"]
    assert offload["loaded_bytes"] > offload["saved_bytes"] > 0
    assert "where the KV of the prefill tier lay" in run.stdout


@pytest.mark.timeout(300)
def test_block_sparse_prefill_in_host_memory(tmp_path: Path) -> None:
    """Below threshold 1, tokens that differ are reported, and are no failure."""
    file = tmp_path / "report.json"
    shape = ("--prefill-tp", "2", "--decode-tp", "1", "--max-new-tokens", "8")
    sparse = ("--sparse-policy", "xattention", "--sparse-threshold", "0.5", "--prefill-offload")
    run = demo(*sparse, *shape, "--json", str(file), cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["leaks"] == report["failed"] == 0
    found = report["sparse"]
    assert 0.3 < found["density"] < 1 and 0 < found["similarity"] <= 1
    # Prompts of up to two blocks have no blocks to skip.
    assert 0 < found["same_tokens"] <= report["requests"]
    assert report["prefill_offload"]["loaded_bytes"] > 0
    assert "Block-sparse prefill attended to" in run.stdout and "tokens differ" not in run.stdout


@pytest.mark.timeout(200)
def test_a_second_run_finds_what_the_first_has_stored(tmp_path: Path, model: Path) -> None:
    reports = []
    for number in range(2):
        file = tmp_path / f"report-{number}.json"
        shape = ("--prefill-tp", "1", "--decode-tp", "2", "--max-new-tokens", "8")
        run = demo("--model", str(model), *shape, "--offload", "kv", "--json", str(file), cwd=tmp_path)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "hit tokens" in run.stdout
        reports.append(json.loads(file.read_text()))
    first, second = (report["offload"] for report in reports)
    assert all(report["tokens_match"] and not report["leaks"] for report in reports)
    assert first["longest_request_tokens"] > first["device_tokens"], "it runs although the device has no room for it"
    assert first["hit_tokens_storage"] == 0
    assert first["stored_bytes"] > 0 and not first["unstored_pages"]
    assert second["hit_tokens_storage"] + second["hit_tokens_host"] > 0.8 * reports[1]["prompt_tokens"]
    assert second["hit_tokens_storage"] > 0 and second["skipped_tokens"] > 0
    assert reports[1]["bytes_moved"] < 0.3 * reports[0]["bytes_moved"]
