"""Equal prefixes: found in host memory, after a restart in the store; nobody else's are, and each page is stored once."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterNode, ClusterSpec, LocalCluster, TierSpec
from kvferry.local_cluster.spec import Role
from tests.cluster.calls import Reference, prompt, until
from tests.cluster.conftest import Start
from tests.cluster.offload.clusters import (
    KEPT,
    PAGE,
    PATIENT,
    hits,
    num_stored,
    number,
    spec,
    stored_files,
    until_all_is_back,
    until_stored,
)
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(300)  # three starts of nodes in one test: half a minute each on a loaded machine

LENGTH, NEW = 101, 6  # twelve whole pages of the prompt, and a token that has to be computed
WHOLE = LENGTH // PAGE
STORED = (LENGTH + NEW - 1) // PAGE  # the last token's KV is never computed
VARIANTS = itertools.count(100)  # of prompts that no other test has


@pytest.fixture(scope="module")
def shared(model: Path, directory: Path, start: Start) -> Iterator[tuple[LocalCluster, ClusterSpec]]:
    settings = KEPT | PATIENT | {"storage.directory": directory}
    with start(spec(model, settings, tp_size=2, pool_tokens=1024)) as cluster:
        yield cluster, cluster.spec


@pytest.fixture
async def cluster(shared: tuple[LocalCluster, ClusterSpec]) -> LocalCluster:
    """As it was at first, whatever the test before this one made of it; host memory and store may have other prompts' pages."""
    found, first = shared
    if found.spec != first:
        await restart(found, prefill=first.prefill, decode=first.decode)
    return found


async def restart(cluster: LocalCluster, *, prefill: TierSpec | None = None, decode: TierSpec | None = None) -> None:
    """Another decode node over the same store, and another prefill node where its spec is another."""
    spec = replace(cluster.spec, prefill=prefill or cluster.spec.prefill, decode=decode or cluster.spec.decode)
    others: list[Role] = ["decode"] if spec.prefill == cluster.spec.prefill else ["decode", "prefill"]
    for node in (node for node in cluster.nodes if node.role in others):
        node.terminate()
        await until(lambda node=node: node.exit_code is not None, f"the {node.role} node ended")  # type: ignore[misc]
        assert node.exit_code == 0
    cluster.spec = spec
    for role in others:
        cluster.launch(role)
    await cluster.wait_joined()


async def asked(decode: ClusterNode, token_ids: tuple[int, ...], num_tokens: int, *, salt: str = "") -> list[int]:
    """Greedy tokens of a request with a salt."""
    found: list[int] = []
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=token_ids), max_new_tokens=num_tokens, ignore_eos=True, cache_salt=salt
    )
    async with NodeClient(decode.address) as client:
        async for event in client.generate(request, accept_timeout_s=30, timeout_s=60):
            if event.HasField("tokens"):
                found += event.tokens.token_ids
    return found


async def tier_of_next_request(cluster: LocalCluster, reference: Reference, token_ids: tuple[int, ...], *, salt: str = "") -> str:
    """Ask, check the tokens, and say where its prefix was found: "host", "storage", or "" where it was not."""
    looked_for = await number(cluster.decode, "kvferry_offload_prompt_tokens_total")
    before = {tier: await hits(cluster.decode, tier) for tier in ("device", "host", "storage")}
    assert await asked(cluster.decode, token_ids, NEW, salt=salt) == reference.tokens(token_ids, NEW)
    await until_all_is_back(cluster.prefill, cluster.decode)
    after = {tier: await hits(cluster.decode, tier) for tier in before}
    assert await number(cluster.decode, "kvferry_offload_prompt_tokens_total") == looked_for + len(token_ids)
    found = [tier for tier in before if after[tier] > before[tier]]
    assert len(found) <= 1, f"before {before}, after {after}"
    assert all(after[tier] == before[tier] + WHOLE * PAGE for tier in found), "a part of its whole pages only"
    return found[0] if found else ""


async def test_host_then_storage_and_nobody_elses(cluster: LocalCluster, reference: Reference, directory: Path) -> None:
    token_ids = prompt(LENGTH, next(VARIANTS))  # a second run finds the store as the first has left it
    since, before = await num_stored(cluster.decode), len(stored_files(directory))
    assert await tier_of_next_request(cluster, reference, token_ids) == ""
    assert await tier_of_next_request(cluster, reference, token_ids) == "host"
    assert await tier_of_next_request(cluster, reference, token_ids, salt="of somebody else") == ""
    assert await tier_of_next_request(cluster, reference, token_ids, salt="of somebody else") == "host"
    await until_stored(cluster.decode, 2 * STORED, since=since)
    assert len(stored_files(directory)) == before + 2 * 2 * STORED, "two salts, two ranks"

    await restart(cluster)
    assert await tier_of_next_request(cluster, reference, token_ids) == "storage"
    assert await tier_of_next_request(cluster, reference, token_ids) == "host"
    assert await tier_of_next_request(cluster, reference, token_ids, salt="of a third") == ""

    own = cluster.spec.decode
    await restart(cluster, decode=replace(own, settings=dict(own.settings) | {"storage.salt": "of other nodes"}))
    assert await tier_of_next_request(cluster, reference, token_ids) == "", "nodes of another salt share nothing"


async def test_another_model_finds_nothing(
    cluster: LocalCluster, model: Path, reference: Reference, directory: Path, tmp_path: Path
) -> None:
    """It has the same shapes and the same weights; what it computes of them is something else."""
    token_ids, since = prompt(LENGTH, 1), await num_stored(cluster.decode)
    assert await tier_of_next_request(cluster, reference, token_ids) == ""
    await until_stored(cluster.decode, STORED, since=since)
    num_files = len(stored_files(directory))
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (other / "config.json").write_text(json.dumps(config))
    spec = cluster.spec
    await restart(cluster, prefill=replace(spec.prefill, model=other), decode=replace(spec.decode, model=other))
    since = await num_stored(cluster.decode)
    assert await tier_of_next_request(cluster, Reference(other), token_ids) == ""
    await until_stored(cluster.decode, STORED, since=since)
    assert len(stored_files(directory)) == num_files + 2 * STORED
