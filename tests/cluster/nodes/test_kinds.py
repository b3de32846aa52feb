"""Models whose layers keep other state than all tokens' K and V: a cluster of each kind matches one process.

Chunks are smaller than the window, prompts and generation pass it several times, pages differ in size and order between the
tiers, and pools hold so little that pages of windows, and states, are used again while requests run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvferry.demo.kinds import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, WINDOW_TOKENS, ModelKind
from kvferry.demo.model import make_demo_model
from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from tests.cluster.calls import Answer, Caller, Reference, prompt, status_of, until, until_idle
from tests.cluster.conftest import HEARTBEAT_S, START_TIMEOUT_S, Start

pytestmark = pytest.mark.timeout(180)

NEW_TOKENS = {5: 8, 24: 8, 71: 20, 327: 70}
"""By length of the prompt; at the end of the longest nothing of its prompt is within the window any more."""
CHUNK_TOKENS = 24
RUNNING_REQUESTS = 2
ROUTES = 2  # 2 -> 1 and 1 -> 2
TOKEN_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4  # K and V of one layer, in float32
LATENT_BYTES = (96 + 16) * 4
STATE_BYTES = NUM_KV_HEADS * (2 * 16 * 16 + (2 * 16 + 2 * 16) * 4) * 4  # recurrent; convolution: query, key, two value heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A cluster, and the bytes and writes of a prompt in it."""

    name: ModelKind
    prefill: Mapping[str, object]
    decode: Mapping[str, object]
    layers_per_group: int | None = None

    def chunks(self, num_tokens: int) -> int:
        return -(-num_tokens // CHUNK_TOKENS)

    def writes(self, num_tokens: int) -> int:
        """One for each chunk and pair of ranks; of two layers at a time, half of the chunks are of states alone."""
        if self.layers_per_group is None:
            return self.chunks(num_tokens) * ROUTES
        return (self.chunks(num_tokens) * 2 + 2) * ROUTES

    def num_bytes(self, num_tokens: int) -> int:
        match self.name:
            case ModelKind.SLIDING:
                return (2 * num_tokens + 6 * min(num_tokens, WINDOW_TOKENS)) * TOKEN_BYTES
            case ModelKind.MLA:
                return NUM_LAYERS * num_tokens * LATENT_BYTES * 2  # both decode ranks need it
            case _:
                return 2 * num_tokens * TOKEN_BYTES + 6 * STATE_BYTES

    def slices(self, num_tokens: int) -> int:
        """Writes that would have been taken without staging."""
        match self.name:
            case ModelKind.SLIDING:
                return (2 * num_tokens + 6 * min(num_tokens, WINDOW_TOKENS)) * 2 * ROUTES
            case ModelKind.MLA:
                return NUM_LAYERS * num_tokens * ROUTES
            case _:
                return (2 * num_tokens * 2 + 6) * ROUTES


KINDS = (
    Kind(
        name=ModelKind.SLIDING,
        prefill={"tp_size": 2, "page_size": 8},
        decode={"tp_size": 1, "page_size": 24, "order": "HND"},
    ),
    Kind(
        name=ModelKind.MLA,
        prefill={"tp_size": 1, "page_size": 16, "order": "HND"},
        decode={"tp_size": 2, "page_size": 5},
    ),
    Kind(
        name=ModelKind.HYBRID,
        prefill={"tp_size": 2, "page_size": 16, "order": "HND"},
        decode={"tp_size": 1, "page_size": 7},
        layers_per_group=2,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    kind: Kind
    cluster: LocalCluster
    reference: Reference


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: str(kind.name))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Iterator[Running]:
    kind: Kind = request.param
    model = make_demo_model(tmp_path_factory.mktemp("kinds") / kind.name, kind=kind.name)
    settings = {"limits.max_running_requests": RUNNING_REQUESTS}
    spec = ClusterSpec(
        prefill=_tier(model, kind.prefill, settings),
        decode=_tier(model, kind.decode, settings),
        chunk_tokens=CHUNK_TOKENS,
        layers_per_group=kind.layers_per_group,
        heartbeat_s=HEARTBEAT_S,
        start_timeout_s=START_TIMEOUT_S,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with start(spec) as cluster:
        yield Running(kind=kind, cluster=cluster, reference=Reference(model))
    torch.set_num_threads(before)


def _tier(model: Path, cut: Mapping[str, object], settings: Mapping[str, object]) -> TierSpec:
    return TierSpec(model=model, pool_tokens=2048, settings=settings, **cut)  # type: ignore[arg-type]


async def test_tokens_are_those_of_one_process(running: Running) -> None:
    kind, cluster = running.kind, running.cluster
    prompts = [prompt(num_tokens, variant) for variant, num_tokens in enumerate(NEW_TOKENS)]
    async with Caller(cluster.decode.address) as caller:
        answers = await asyncio.gather(*(caller.ask(token_ids, NEW_TOKENS[len(token_ids)]) for token_ids in prompts))
    for token_ids, answer in zip(prompts, answers, strict=True):
        running.reference.check(token_ids, answer)
        check_stats(kind, len(token_ids), answer)
    await until_idle(cluster.prefill, cluster.decode)


def check_stats(kind: Kind, num_tokens: int, answer: Answer) -> None:
    """Check that KV which decode does not read is not sent, and not counted."""
    assert answer.done is not None
    stats = answer.done.stats
    assert (stats.bytes, stats.resends) == (kind.num_bytes(num_tokens), 0)
    assert (stats.writes, stats.writes_without_staging) == (kind.writes(num_tokens), kind.slices(num_tokens))


async def holds_more_than(node: ClusterNode, num_tokens: int) -> bool:
    status = await status_of(node)
    page_size = status.instance.shard.page_size if status is not None else 0
    return status is not None and any(rank.pools[0].bound * page_size > num_tokens for rank in status.ranks)


@pytest.mark.parametrize("when", ["mid-transfer", "mid-decode"])
async def test_what_a_cancelled_request_leaves_behind_harms_nobody(running: Running, when: str) -> None:
    """It is cut off with some of its KV in place, and its pages and its state's row go to others."""
    cluster = running.cluster
    beside_ids, after_ids = prompt(80, 20), prompt(40, 21)
    async with Caller(cluster.decode.address) as caller:
        _, beside = caller.begin(beside_ids, 30)
        if when == "mid-transfer":
            _, task = caller.begin(prompt(900, 22), 16, request_id="leaves-early")
            await until(lambda: holds_more_than(cluster.decode, 200), "KV of the long request in the decode pool")
        else:
            answer, task = caller.begin(prompt(80, 22), 600, request_id="leaves-late")
            await until(lambda: len(answer.tokens) >= 5, "five tokens")
        assert not task.done()
        task.cancel()
        after = await asyncio.gather(*(caller.ask(after_ids, 30) for _ in range(RUNNING_REQUESTS)))  # every state's row
        running.reference.check(beside_ids, await beside)
        for one in after:
            running.reference.check(after_ids, one)
    await until_idle(cluster.prefill, cluster.decode)
