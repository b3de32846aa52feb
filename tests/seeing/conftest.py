"""A cluster under load, to be looked at: two prefill nodes, one of which a test may stop, and a decode node."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvferry.local_cluster import ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Caller, prompt
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S, Start, model, start
from tests.deploy.page.chromium import Tab, tab

__all__ = ["model", "start"]

PROMPT_TOKENS = 300


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="session")
def cluster(model: Path, start: Start) -> Iterator[LocalCluster]:
    tier = TierSpec(model=model, page_size=16, pool_tokens=8192, settings={"status_page.request_ids": True})
    spec = ClusterSpec(
        prefill=tier,
        decode=TierSpec(model=model, page_size=32, pool_tokens=8192),
        num_prefill=2,
        chunk_tokens=64,
        heartbeat_s=HEARTBEAT_S,
        start_timeout_s=START_TIMEOUT_S,
    )
    with start(spec) as cluster:
        yield cluster


@contextmanager
def under_load(address: str) -> Iterator[None]:
    """Requests come for as long as this lasts: some that generate for long, and prompts that are moved all the time."""
    loop = asyncio.new_event_loop()

    async def moving(caller: Caller, number: int) -> None:
        variant = 0
        while True:
            variant += 1
            await caller.ask(prompt(PROMPT_TOKENS, 100 * number + variant), 2)

    async def generating(caller: Caller, number: int) -> None:
        while True:
            answer, task = caller.begin(prompt(40, number), 400, request_id=f"customer-{number}-story")
            await task
            answer.tokens.clear()

    async def load() -> None:
        async with Caller(address) as caller:
            await asyncio.gather(*(moving(caller, number) for number in range(2)), *(generating(caller, n) for n in range(2)))

    task = loop.create_task(load())

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
        loop.close()
