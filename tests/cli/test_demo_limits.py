"""A demo that cannot succeed says so at once, and says what it is."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

import kvferry.demo as demo_module
from kvferry.cluster_spec import child_environment
from kvferry.demo import DemoOptions, run_demo
from kvferry.demo_print import print_report
from kvferry.demo_prompts import BUILT_IN, check_prompts_fit
from kvferry.demo_report import DemoReport, RequestOutcome, make_report
from kvferry.demo_view import PlainView, RequestProgress
from kvferry.node_client import NodeClient
from kvferry.reference_generate import ReferenceResult
from kvferry.reference_run import ReferenceRun
from transfer.errors import ConfigError, PeerUnreachable
from transfer.pb import kvferry_pb2 as pb

CONTEXT = 4096  # tokens, of the demo model


@pytest.mark.parametrize("max_new_tokens", [4090, 5000])
async def test_a_request_beyond_the_context_is_refused_before_anything_starts(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], max_new_tokens: int
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(demo_module, "LocalCluster", started)
    monkeypatch.setattr(demo_module, "ReferenceRun", started)
    assert await run_demo(DemoOptions(model=demo_dir, max_new_tokens=max_new_tokens, num_requests=2)) == 2
    errors = capfd.readouterr().err
    assert errors.count("\n") == 1 and errors.startswith("kvferry demo: prompt 2 has ")
    assert f"--max-new-tokens is {max_new_tokens}, together {max_new_tokens + 14}" in errors, errors
    assert f"context is {CONTEXT} tokens" in errors


async def test_what_just_fits_is_taken(demo_dir: Path) -> None:
    await check_prompts_fit(demo_dir, BUILT_IN[:1], 1)
    with pytest.raises(ConfigError, match=r"prompt 1 has (\d+) tokens") as refused:
        await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT)
    prompt_tokens = int(str(refused.value).split()[3])
    await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT - prompt_tokens)
    with pytest.raises(ConfigError):
        await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT - prompt_tokens + 1)


@pytest.mark.parametrize("config", [None, "{", "[]", "{}", '{"max_position_embeddings": null}'])
async def test_a_model_that_does_not_tell_its_context_is_left_to_the_nodes(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    await check_prompts_fit(tmp_path, BUILT_IN, 10**9)


def test_the_command_ends_with_2_in_seconds(tmp_path: Path, demo_dir: Path) -> None:
    command = [sys.executable, "-m", "kvferry", "demo", "--model", str(demo_dir), "--max-new-tokens", "4090", "--requests", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=tmp_path, env=child_environment())
    assert (run.returncode, run.stdout) == (2, ""), run.stdout + run.stderr


async def test_the_reference_ends_as_soon_as_a_request_has_failed(demo_dir: Path) -> None:
    class Refusing:
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise PeerUnreachable("no prefill node is joined")
            yield

    with ReferenceRun(demo_dir, BUILT_IN * 100, 1000, child_environment()) as reference:
        progress = RequestProgress(number=1, max_new_tokens=1000, token_ids=[])
        view = PlainView(Console(quiet=True))
        outcome = await demo_module._generate(cast(NodeClient, Refusing()), BUILT_IN[0], progress, view, reference)
        assert outcome.error == "no prefill node is joined"
        async with asyncio.timeout(5):
            results = await reference.results()
    assert results == [None] * len(BUILT_IN) * 100


async def test_what_a_cancelled_reference_has_made_is_kept(demo_dir: Path) -> None:
    prompts = (*BUILT_IN[:2], *BUILT_IN * 100)
    with ReferenceRun(demo_dir, prompts, 8, child_environment()) as reference:
        file = Path(reference._folder.name) / "results"
        while file.read_text().count("\n") < 2:
            await asyncio.sleep(0.02)
        reference.cancel()
        with file.open("a") as results_file:
            results_file.write('{"prompt_tokens": 9, "token_')  # killed while it wrote
        results = await reference.results()
    made = [result for result in results if result is not None]
    assert len(results) == len(prompts) and 2 <= len(made) < len(prompts)
    assert results[: len(made)] == made and all(len(result.token_ids) == 8 for result in made)


def report_of(outcomes: list[RequestOutcome], reference: list[ReferenceResult | None]) -> DemoReport:
    return make_report(
        outcomes, reference, decode=pb.NodeStatus(), leaked=(), seconds=2.0, generate_seconds=1.0, dtype="float32", environment={}
    )


def printed(report: DemoReport) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    print_report(console, report)
    return console.export_text()


def done(*token_ids: int) -> RequestOutcome:
    return RequestOutcome(prompt_tokens=5, token_ids=token_ids, done=pb.GenerateDone())


REFUSED = RequestOutcome(error="max_new_tokens is 4090; must be in [1, 4085]")
DIED = RequestOutcome(prompt_tokens=5, token_ids=(1,), error="rank 1 died")


def test_a_refusal_is_called_one() -> None:
    report = report_of([REFUSED, DIED, done(1, 2)], [None, None, None])
    assert report.refusals == (f"request 1: {REFUSED.error}",) and report.failures == ("request 2: rank 1 died",)
    assert (report.failed, report.compared, report.tokens_match, report.is_success) == (2, 0, False, False)
    text = printed(report)
    assert "refused: request 1: max_new_tokens is 4090" in text and "failed: request 2: rank 1 died" in text
    assert "not compared" in text and "differ" not in text
    assert "Failed: 1 of 3 requests were refused, 1 of 3 requests failed." in text
    assert json.loads(json.dumps(report.to_json()))["refusals"] == list(report.refusals)


def test_what_was_compared_is_still_told() -> None:
    wanted = ReferenceResult(prompt_tokens=5, token_ids=(1, 2))
    fine = printed(report_of([done(1, 2), REFUSED], [wanted, None]))
    assert "1 compared, none differs" in fine and "tokens differ" not in fine
    other = printed(report_of([done(1, 3), REFUSED], [wanted, None]))
    assert "NO" in other and "tokens differ: request 1: generated token 2 is 3" in other and "refused: request 2" in other
