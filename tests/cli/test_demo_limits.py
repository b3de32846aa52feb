"""A demo that cannot succeed says so at once, and says what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvferry.demo.command as demo_module
from kvferry.demo.command import run_demo
from kvferry.demo.options import DemoOptions
from kvferry.demo.prompts import BUILT_IN, check_prompts_fit
from transfer.errors import ConfigError

CONTEXT = 4096  # tokens, of the demo model


@pytest.mark.parametrize("max_new_tokens", [4090, 5000])
async def test_a_request_beyond_the_context_is_refused_before_anything_starts(
    demo_dir: Path, monkeypatch: pytest.MonkeyPatch, max_new_tokens: int
) -> None:
    def started(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(demo_module, "LocalCluster", started)
    monkeypatch.setattr(demo_module, "ReferenceRun", started)
    needed = f"--max-new-tokens is {max_new_tokens}, together {max_new_tokens + 14}; the model's context is {CONTEXT} tokens"
    with pytest.raises(ConfigError, match=f"^prompt 2 has 14 tokens and {needed}$"):
        await run_demo(DemoOptions(model=demo_dir, max_new_tokens=max_new_tokens, num_requests=2))


async def test_what_just_fits_is_taken(demo_dir: Path) -> None:
    await check_prompts_fit(demo_dir, BUILT_IN[:1], 1)
    with pytest.raises(ConfigError, match=r"prompt 1 has (\d+) tokens") as refused:
        await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT)
    prompt_tokens = int(str(refused.value).split()[3])
    await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT - prompt_tokens)
    with pytest.raises(ConfigError):
        await check_prompts_fit(demo_dir, BUILT_IN[:1], CONTEXT - prompt_tokens + 1)
