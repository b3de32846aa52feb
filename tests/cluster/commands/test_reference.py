"""The process of the reference: its results, its failure, and its end before it has made them all."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from kvferry.cli.node_client import NodeClient
from kvferry.demo.command import generate_one
from kvferry.demo.prompts import BUILT_IN
from kvferry.demo.reference import ReferenceRun, generate_all
from kvferry.demo.report import DemoRequest
from kvferry.demo.view import DemoView
from kvferry.local_cluster.spec import child_environment
from transfer.errors import EngineError, PeerUnreachable

PROMPTS = BUILT_IN[:2]


async def test_the_process_returns_the_results_of_the_function(model: Path) -> None:
    with ReferenceRun(model, PROMPTS, 12, child_environment()) as run:
        results = await run.results()
    assert results == list(generate_all(model, PROMPTS, 12, dtype="float32"))


async def test_reference_that_fails_is_an_error_and_no_result(tmp_path: Path) -> None:
    run = ReferenceRun(tmp_path / "missing", PROMPTS, 12, child_environment())
    with run, pytest.raises(EngineError, match="single process that the tokens are compared with failed"):
        await run.results()


async def test_leaving_ends_the_process(model: Path) -> None:
    with ReferenceRun(model, PROMPTS * 100, 200, child_environment()) as run:
        os.kill(run.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(run.pid, 0)


async def test_the_reference_ends_as_soon_as_a_request_has_failed(model: Path) -> None:
    class Refusing:
        async def generate(self, *_: Any, **__: Any) -> Any:
            raise PeerUnreachable("no prefill node is joined")
            yield

    with ReferenceRun(model, BUILT_IN * 100, 1000, child_environment()) as reference:
        request = DemoRequest(prompt=BUILT_IN[0], max_new_tokens=1000)
        await generate_one(cast(NodeClient, Refusing()), request, DemoView(Console(quiet=True)), reference)
        assert request.error == "no prefill node is joined"
        results = await reference.results()
    assert results == [None] * len(BUILT_IN) * 100


async def test_what_a_cancelled_reference_has_made_is_kept(model: Path) -> None:
    prompts = (*PROMPTS, *BUILT_IN * 100)
    with ReferenceRun(model, prompts, 8, child_environment()) as reference:
        while reference.results_file.read_text().count("\n") < 2:
            await asyncio.sleep(0.02)
        reference.cancel()
        with reference.results_file.open("a") as results_file:
            results_file.write('{"prompt_tokens": 9, "token_')  # killed while it wrote
        results = await reference.results()
    made = [result for result in results if result is not None]
    assert len(results) == len(prompts) and 2 <= len(made) < len(prompts)
    assert results[: len(made)] == made and all(len(result.token_ids) == 8 for result in made)
