"""A context four times as long as device and host memory together: its first pages lie in the store while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import pytest

from kvferry.demo.kinds import ModelKind
from kvferry.demo.model import make_demo_model
from kvferry.local_cluster.cluster import LocalCluster
from tests.cluster.calls import Caller, Reference, prompt, until
from tests.cluster.conftest import Start
from tests.cluster.offload.clusters import PAGE, PATIENT, number, spec, until_all_is_back

pytestmark = pytest.mark.timeout(300)

DEVICE_TOKENS = 128
HOST_TOKENS = 2 * DEVICE_TOKENS
LENGTH = 4 * (DEVICE_TOKENS + HOST_TOKENS)
SMALL: Mapping[str, object] = {"offload.host_ratio": 2, "offload.device_window": 16, "offload.stride_tokens": 16}
KINDS = (ModelKind.LLAMA, ModelKind.MLA)
"""Of MLA, all ranks have one copy in the store."""

TP_SIZE = 2


@pytest.fixture(scope="module", params=KINDS, ids=str)
def model_of_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: ModelKind = request.param
    return make_demo_model(tmp_path_factory.mktemp("kinds") / kind, kind=kind)


@pytest.fixture(scope="module")
def cluster(model_of_kind: Path, directory: Path, start: Start) -> Iterator[LocalCluster]:
    settings = {**SMALL, **PATIENT, "storage.directory": directory}
    with start(spec(model_of_kind, settings, tp_size=TP_SIZE, pool_tokens=DEVICE_TOKENS)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def own_reference(model_of_kind: Path) -> Reference:
    return Reference(model_of_kind)


def running_files(directory: Path) -> list[Path]:
    return list(directory.glob("*/*/*-running"))


async def test_its_tokens_are_those_of_one_process(cluster: LocalCluster, own_reference: Reference, directory: Path) -> None:
    decode, token_ids = cluster.decode, prompt(LENGTH)
    stored = await number(decode, "kvferry_offload_stored_pages_total")
    async with Caller(decode.address) as caller:
        answer = await caller.ask(token_ids, 24, timeout_s=240)
    own_reference.check(token_ids, answer)
    stored = await number(decode, "kvferry_offload_stored_pages_total") - stored
    assert stored > (LENGTH - DEVICE_TOKENS - HOST_TOKENS) // PAGE
    await until_all_is_back(cluster.prefill, decode)
    assert not running_files(directory), "they go with their request"


@pytest.mark.parametrize("ranks", ["of all ranks", "of the last rank"])
async def test_a_store_that_loses_its_pages_ends_it_alone(
    cluster: LocalCluster, own_reference: Reference, directory: Path, ranks: str
) -> None:
    decode, short_ids = cluster.decode, prompt(16, 3)
    async with Caller(decode.address) as caller:
        long, task = caller.begin(prompt(LENGTH, 2), 200)
        await until(lambda: len(long.tokens) > 1, "its first tokens", within_s=120)
        short, short_task = caller.begin(short_ids, 24)
        await until(lambda: len(short.tokens) > 1, "tokens of another request", within_s=60)
        for path in running_files(directory):
            if ranks == "of all ranks" or f"-{TP_SIZE - 1}of{TP_SIZE}-" in path.name or "-all-" in path.name:
                path.unlink(missing_ok=True)
        await task
        await short_task
    assert long.code is grpc.StatusCode.UNAVAILABLE, (long.code, long.details)
    assert f"{directory} did not return KV of the request that it has stored" in (long.details or "")
    own_reference.check(short_ids, short)
    await until_all_is_back(cluster.prefill, decode)
    assert not running_files(directory)
