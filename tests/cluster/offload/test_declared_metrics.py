"""Everything that is declared is in the output of real nodes, where docs/metrics.md says so, with the labels that it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.local_cluster.cluster import ClusterNode, LocalCluster
from tests.cluster.calls import Caller, prompt, status_of, until, until_idle
from tests.cluster.conftest import Start
from tests.cluster.offload.clusters import EARLY, metrics_page, number, number_on, spec
from transfer.metrics import NODE_METRICS, RANK_METRICS, MetricSpec
from transfer.pb import kvferry_pb2 as pb

pytestmark = pytest.mark.timeout(180)

LATER: Final = {
    *("kvferry_refused_calls", "kvferry_rank_refused_calls"),  # once a certificate was refused
    *("kvferry_certificate_expiry_timestamp_seconds", "kvferry_certificate_stale"),  # with certificates
    # on prefill nodes that register themselves
    *(f"kvferry_discovery_{name}" for name in ("addresses", "age_seconds", "interval_seconds", "failures", "refused_entries")),
    "kvferry_dropped_messages",  # on prefill nodes once a message was dropped
    "kvferry_prefill_blocks",  # with a sparse policy
    "kvferry_offload_copied_bytes",  # on prefill nodes once a prompt did not fit the device
}
"""Metrics that need not be there on every node that serves them."""

SPECS: Final = tuple({spec.name: spec for spec in (*RANK_METRICS, *NODE_METRICS)}.values())
RANKS_OWN: Final = {spec.name for spec in RANK_METRICS}


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory, start: Start) -> Iterator[LocalCluster]:
    storage = {"storage.directory": tmp_path_factory.mktemp("store")}
    with start(spec(model, EARLY | storage, prefill=storage)) as cluster:
        yield cluster


async def samples(node: ClusterNode) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Samples of each metric of a node's page."""
    return {
        family.name: [(sample.name, sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(await metrics_page(node))
    }


async def traffic(cluster: LocalCluster) -> None:
    """Requests that are served, kept, found again, aborted by an operator, and given up by their client."""
    async with Caller(cluster.decode.address) as caller:
        for new in (40, 8):  # the second finds the first one's prompt
            assert (await caller.ask(prompt(90), new)).code is grpc.StatusCode.OK
        answer, growing = caller.begin(prompt(70, 1), 1000)
        await until(lambda: bool(answer.tokens), "the first token")
        await caller.stub.Abort(pb.AbortRequest(request_id=answer.request_id))
        assert (await growing).code is grpc.StatusCode.ABORTED
        answer, growing = caller.begin(prompt(70, 2), 1000)
        await until(lambda: bool(answer.tokens), "the first token")
        growing.cancel()
        await asyncio.gather(growing, return_exceptions=True)


async def test_everything_declared_is_served_and_nothing_else(cluster: LocalCluster) -> None:
    await traffic(cluster)

    async def is_counted() -> bool:
        return {await number(cluster.decode, "kvferry_aborts_total", reason=reason) for reason in ("operator", "caller")} == {1}

    await until(is_counted, "both ends are counted")
    await until(lambda: is_shown(cluster), "ranks have reported")
    pages = {node.role: await samples(node) for node in cluster.nodes}
    for spec_ in SPECS:
        served = {role for role, page in pages.items() if page.get(spec_.name)}
        if spec_.name in LATER:
            assert served <= set(spec_.roles), spec_.name
        else:
            assert served == set(spec_.roles), f"{spec_.name} is served by {served}, declared for {spec_.roles}"
        for role in served:
            check(spec_, role, pages[role][spec_.name])
    declared = {spec_.name for spec_ in SPECS}
    assert all(page.keys() <= declared for page in pages.values())


async def is_shown(cluster: LocalCluster) -> bool:
    """The last request's part of what ranks say: they report once a second."""
    page = await samples(cluster.prefill)
    return any(name.endswith("_total") and value > 0 for name, _, value in page.get("kvferry_link_written_bytes", ()))


def check(spec_: MetricSpec, role: str, found: list[tuple[str, dict[str, str], Any]]) -> None:
    for name, labels, _ in found:
        assert labels.pop("role") == role
        keys = set(labels) - {"le", "rank"}
        assert keys == set(spec_.labels), f"{name} has {keys}"
        assert "rank" in labels or spec_.name not in RANKS_OWN or spec_ in NODE_METRICS, name
        for label, values in zip(spec_.labels, spec_.values, strict=True):
            assert isinstance(values, str) or labels[label] in values, f"{name}: {label} is {labels[label]}"


async def idle_checks(cluster: LocalCluster) -> dict[int, int]:
    statuses = [await status_of(node) for node in cluster.nodes]
    return {rank.pid: rank.idle_checks for status in statuses if status is not None for rank in status.ranks}


async def test_metrics_of_an_ordinary_transfer_count_and_agree(cluster: LocalCluster) -> None:
    """Not declared and never moved: every count of an ordinary transfer is above zero, and they agree with each other."""
    await until_idle(*cluster.nodes)
    checked = await idle_checks(cluster)
    assert len(checked) == len(cluster.nodes), "a node of one rank did not answer"

    async def have_reported() -> bool:
        now = await idle_checks(cluster)
        return all(now.get(pid, 0) >= count + 2 for pid, count in checked.items())

    await until(have_reported, "reports of all ranks, made after the end")
    prefill, decode = await metrics_page(cluster.prefill), await metrics_page(cluster.decode)

    def total(page: str, name: str, suffix: str = "_total", **where: str) -> float:
        return number_on(page, f"kvferry_{name}{suffix}", **where)

    written = total(prefill, "link_written_bytes")
    assert written == total(prefill, "transferred_bytes") > 0
    assert total(prefill, "link_busy_seconds") > 0 and total(prefill, "link_probe_seconds") > 0
    for stage in ("credit_wait", "gather", "write", "ack", "exposed", "total"):
        assert total(prefill, "stage_seconds", "_count", stage=stage) > 0, stage
    assert total(prefill, "overlap_ratio", "_count") == total(prefill, "stage_seconds", "_count", stage="total")
    assert total(decode, "stage_seconds", "_count", stage="scatter") > 0
    for page in (prefill, decode):
        assert total(page, "step_seconds", "_count") > 0 and total(page, "prompt_tokens") >= 90
    assert total(decode, "generated_tokens") >= 48
    assert total(decode, "ring_watermark_position_bytes", "") >= written - 4096
    assert total(decode, "ring_watermark_lag_bytes", "") == total(decode, "ring_watermark_stalled_seconds", "") == 0
    assert total(decode, "links_fallen_back", "") == 0
