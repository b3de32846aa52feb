"""A cluster whose collector of spans goes away and comes back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.calls import until, until_idle
from tests.serving.conftest import Serving, open_serving
from tests.serving.test_traces import CLIENT, EVERY, asked, check_whole, generate
from tests.tracing.collector import listening

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with open_serving(model, tmp_path_factory.mktemp("serving")) as opened:
        yield opened


async def test_a_collector_that_is_away_is_logged_once_and_harms_no_request(serving: Serving) -> None:
    cluster = serving.cluster
    sampled = f"00-{'c' * 32}-{'d' * 16}-01"
    everybody = {("decode", None), ("decode", 0), ("prefill", None), ("prefill", 0), ("prefill", 1)}

    def logged(event: str) -> Counter[tuple[str, object]]:
        return Counter((node.role, line.get("rank")) for node in cluster.nodes for line in node.log.events(event))

    async def is_there() -> bool:
        """Return whether every process that logged the collector as away has logged its return; a busy machine exports late."""
        if logged("tracing_collector_unreachable") == logged("tracing_collector_recovered"):
            return True
        await generate(serving, sampled, variant=9)
        return False

    await until(is_there, "nobody takes the collector for away")
    away, back = logged("tracing_collector_unreachable"), logged("tracing_collector_recovered")
    serving.collecting.close()
    for variant in range(3):
        await generate(serving, sampled, variant=variant + 10)
    await until(lambda: set(logged("tracing_collector_unreachable") - away) == everybody, "every process has said so")
    for variant in range(3):
        await generate(serving, sampled, variant=variant + 20)
    await until_idle(*cluster.nodes)
    said_while_away = logged("tracing_collector_unreachable")
    with listening(serving.collector, serving.collector_port):

        async def is_back() -> bool:
            await generate(serving, sampled, variant=30)
            return set(logged("tracing_collector_recovered") - back) == everybody

        await until(is_back, "the collector has been found again")
        trace_id = await asked(serving)
        check_whole(await asyncio.to_thread(serving.collector.until, trace_id, EVERY | {CLIENT}))
    assert said_while_away - away == Counter(everybody), "each says it once"
    noise = [line for node in cluster.nodes for line in node.log.lines() if "opentelemetry" in line or "Traceback" in line]
    assert not noise
