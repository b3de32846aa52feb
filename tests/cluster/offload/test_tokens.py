"""With KV in host memory a cluster says what one process says, whatever lies where: each kind of model, and tiers cut apart."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvferry.demo.kinds import ModelKind
from kvferry.demo.model import make_demo_model
from kvferry.local_cluster.cluster import LocalCluster
from tests.cluster.calls import Caller, Reference, prompt, until
from tests.cluster.conftest import Start
from tests.cluster.offload.clusters import EARLY, PAGE, PATIENT, another_life, hits, number, spec, stored_files, until_all_is_back
from transfer.layer_groups import GroupKind

pytestmark = pytest.mark.timeout(180)

KINDS: Mapping[ModelKind, Mapping[str, object]] = {
    ModelKind.LLAMA: {"tp_size": 2, "prefill_tp_size": 1, "order": "HND"},
    ModelKind.SLIDING: {
        "tp_size": 1,
        "prefill_tp_size": 2,
        "pool_tokens": 320,
    },  # windows stay on the device, and need room there
    ModelKind.MLA: {"tp_size": 2, "prefill_tp_size": 1},
    ModelKind.HYBRID: {"tp_size": 1, "prefill_tp_size": 2, "order": "HND"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    kind: ModelKind
    cluster: LocalCluster
    reference: Reference
    directory: Path

    @property
    def device_tokens(self) -> int:
        return self.cluster.spec.decode.pool_tokens


LENGTH = 103
"""Of a prompt whose window of 64 tokens begins with a page: otherwise its first page never comes whole, and is not kept."""


@pytest.fixture(scope="module", params=list(KINDS), ids=str)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Iterator[Running]:
    kind: ModelKind = request.param
    model = make_demo_model(tmp_path_factory.mktemp("kinds") / kind, kind=kind)
    directory = tmp_path_factory.mktemp("store")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    settings = EARLY | PATIENT | {"storage.directory": directory}
    if kind is ModelKind.LLAMA:
        settings |= {"kernels": "torch"}
    with start(spec(model, settings, **KINDS[kind])) as cluster:  # type: ignore[arg-type]
        yield Running(kind=kind, cluster=cluster, reference=Reference(model), directory=directory)
    torch.set_num_threads(before)


async def test_a_prompt_larger_than_the_device_pool(running: Running) -> None:
    """Its leading pages arrive in host memory; the second time they are there."""
    decode, token_ids = running.cluster.decode, prompt(3 * running.device_tokens + 5)
    saved = await number(decode, "kvferry_offload_saved_pages_total", source="prompt")
    async with Caller(decode.address) as caller:
        running.reference.check(token_ids, await caller.ask(token_ids, 12))
        saved = await number(decode, "kvferry_offload_saved_pages_total", source="prompt") - saved
        assert saved >= 2 * running.device_tokens // PAGE
        before = await hits(decode, "host")
        running.reference.check(token_ids, await caller.ask(token_ids, 12))
        assert await hits(decode, "host") > before + 2 * running.device_tokens
    await until_all_is_back(running.cluster.prefill, decode)


async def test_more_new_tokens_than_the_device_pool_holds(running: Running) -> None:
    decode, token_ids = running.cluster.decode, prompt(21, 1)
    before = await number(decode, "kvferry_offload_released_pages_total")
    async with Caller(decode.address) as caller:
        running.reference.check(token_ids, await caller.ask(token_ids, running.device_tokens + 20))
    released = await number(decode, "kvferry_offload_released_pages_total") - before
    assert released >= 3, "pages were to leave the device before the request ended"
    await until_all_is_back(running.cluster.prefill, decode)


async def test_several_at_once_shrink_and_grow(running: Running) -> None:
    """One has nearly all of the device; it gives pages up for two others, and gets them back when these are gone."""
    for _ in range(10):  # where the first one was over before the others, they come sooner the next time: more of them is known
        if await gets_pages_back(running):
            break
    else:
        raise AssertionError("the others never came in beside the first one, or it never got pages back")
    await until_all_is_back(running.cluster.prefill, running.cluster.decode)


async def gets_pages_back(running: Running) -> bool:
    """Whether one request gave pages up for two others, which were over before it, and got pages back; all tokens are right."""
    decode, names = running.cluster.decode, [f"kvferry_offload_{what}_pages_total" for what in ("released", "restored")]
    before = [await number(decode, name) for name in names]
    async with Caller(decode.address) as caller:
        first_ids = prompt(100, 2)
        first, task = caller.begin(first_ids, 170)
        await until(lambda: len(first.tokens) > 2, "some tokens")
        others = [prompt(70 + 11 * variant, variant) for variant in (3, 4)]
        answers = await asyncio.gather(*(caller.ask(token_ids, 8) for token_ids in others))
        await task
    for token_ids, answer in zip([first_ids, *others], [first, *answers], strict=True):
        running.reference.check(token_ids, answer)
    were_beside = all(answer.ended_s < first.ended_s for answer in answers)
    return were_beside and all([await number(decode, name) > known for name, known in zip(names, before, strict=True)])


async def test_the_store_has_what_was_computed(running: Running) -> None:
    """Of every kind; states are in no store, and a request that finds the rest of a prompt gets them from prefill."""
    decode, token_ids, before = running.cluster.decode, prompt(LENGTH, 9), set(stored_files(running.directory))
    async with Caller(decode.address) as caller:
        running.reference.check(token_ids, await caller.ask(token_ids, 4))

    num_pages = (LENGTH + 3) // PAGE

    def pages() -> set[str]:
        """Hashes of what is new."""
        return {path.name.partition("-")[0] for path in set(stored_files(running.directory)) - before}

    await until(lambda: len(pages()) >= num_pages, "all pages but the last token's are stored", within_s=60)
    await until_all_is_back(running.cluster.prefill, decode)
    assert len(pages()) == num_pages
    assert not [path for path in stored_files(running.directory) if GroupKind.STATE in path.name]
    await another_life(running.cluster)
    found = await hits(decode, "storage")
    async with Caller(decode.address) as caller:
        running.reference.check(token_ids, await caller.ask(token_ids, 4))
    assert await hits(decode, "storage") == found + (LENGTH - 1) // PAGE * PAGE, "one token at least is computed"
    await until_all_is_back(running.cluster.prefill, decode)
