"""A demo that cannot succeed says so at once, and says what it is."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvferry.demo as demo_module
from kvferry.demo import DemoOptions, run_demo
from kvferry.demo_print import print_report
from kvferry.demo_prompts import BUILT_IN, check_prompts_fit
from kvferry.demo_report import DemoReport, RequestOutcome, make_report
from kvferry.reference_generate import ReferenceResult
from transfer.errors import ConfigError
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
