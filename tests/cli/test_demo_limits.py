"""A demo that cannot succeed says so at once, and says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvferry.demo.command as demo_module
from kvferry.demo.command import DemoOptions, run_demo
from kvferry.demo.prompts import BUILT_IN, check_prompts_fit
from transfer.errors import ConfigError

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
