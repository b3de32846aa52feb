"""A prefill node of another cut does not compute what decode ranks have stored, and the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.local_cluster.cluster import LocalCluster
from tests.cluster.calls import Caller, Reference, prompt
from tests.cluster.conftest import Start
from tests.cluster.offload.clusters import (
    KEPT,
    PAGE,
    PATIENT,
    num_stored,
    number,
    spec,
    until_all_is_back,
    until_stored,
)

pytestmark = pytest.mark.timeout(180)

LENGTH, NEW = 101, 6
WHOLE = (LENGTH - 1) // PAGE * PAGE


@pytest.fixture(scope="module")
def cluster(model: Path, directory: Path, start: Start) -> Iterator[LocalCluster]:
    """Two prefill ranks with pages of 16 tokens, and one decode rank with pages of 8 in the other order."""
    storage = PATIENT | {"storage.directory": directory}
    both = spec(model, KEPT | storage, prefill=storage, prefill_tp_size=2, order="HND", pool_tokens=1024)
    with start(both) as cluster:
        yield cluster


async def loaded(cluster: LocalCluster, reference: Reference, token_ids: tuple[int, ...]) -> float:
    """Ask, check the tokens, and say how many of the prompt the prefill node did not compute."""
    async with Caller(cluster.decode.address) as caller:
        reference.check(token_ids, await caller.ask(token_ids, NEW))
    await until_all_is_back(cluster.prefill, cluster.decode)
    return await number(cluster.prefill, "kvferry_loaded_prompt_tokens_total")


async def test_what_was_stored_is_not_computed_again(cluster: LocalCluster, reference: Reference) -> None:
    token_ids = prompt(LENGTH)
    since = await num_stored(cluster.decode)
    before = await loaded(cluster, reference, token_ids)
    await until_stored(cluster.decode, WHOLE // PAGE, since=since)
    assert await loaded(cluster, reference, token_ids) == before + WHOLE
    longer = (*token_ids, *prompt(70, 1))
    assert await loaded(cluster, reference, longer) == before + 2 * WHOLE, "a prompt that goes on behind it"
