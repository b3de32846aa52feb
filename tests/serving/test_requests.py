"""Requests to the running cluster, and the metrics and statuses of its nodes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from deploy.monitoring import ALERTS, DASHBOARDS
from kvferry.local_cluster.cluster import ClusterNode
from tests.cluster.calls import Answer, Reference, prompt, status_of, until
from tests.serving.conftest import CHUNK_TOKENS, Serving
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.peer_channel import PeerChannel

CONTEXT = 4096
VOCABULARY = 768
TOKEN_BYTES = 8 * 12 * 2 * 32 * 4
"""Bytes of KV per token: layers x KV heads x (K and V) x elements of a head x bytes of float32."""
INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_tokens_match_one_process_and_every_byte_is_transferred_once(serving: Serving, reference: Reference) -> None:
    """Two prefill ranks send the KV. The decode node stores the KV of long prompts on three tiers."""
    prompts = [prompt(num_tokens, num_tokens) for num_tokens in (1, 64, 65, 129, 700)]
    async with serving.caller() as caller:
        answers = await asyncio.gather(*(caller.ask(token_ids, 20, timeout_s=120) for token_ids in prompts))
    for token_ids, answer in zip(prompts, answers, strict=True):
        reference.check(token_ids, answer)
        assert answer.done is not None
        stats = answer.done.stats
        assert (stats.bytes, stats.resends) == (len(token_ids) * TOKEN_BYTES, 0)
        assert stats.writes == 2 * -(-len(token_ids) // CHUNK_TOKENS)
        assert 0 <= stats.exposed_s <= stats.transfer_s
        assert answer.done.prefill_node == serving.cluster.prefill.address
    await serving.until_idle()


async def test_a_prompt_that_the_store_has_is_not_transferred_again(serving: Serving, reference: Reference) -> None:
    token_ids = prompt(400, 77)
    async with serving.caller() as caller:
        first = await caller.ask(token_ids)
        reference.check(token_ids, first)

        async def is_stored() -> bool:
            return metric(await page_of(serving.cluster.decode), "kvferry_offload_backup_queue") == 0 and any(
                path.is_file() for path in serving.store.glob("*/*/*")
            )

        await until(is_stored, "pages in the store")
        again = await caller.ask(token_ids)
        reference.check(token_ids, again)
    assert first.done is not None and again.done is not None
    assert again.done.stats.bytes < first.done.stats.bytes == 400 * TOKEN_BYTES
    await serving.until_idle()


@pytest.mark.parametrize(
    ("token_ids", "new", "sampling", "words"),
    [
        ((), 4, {}, ("prompt is empty",)),
        (prompt(CONTEXT), 1, {}, (str(CONTEXT), "context")),
        ((1, VOCABULARY), 4, {}, (f"token_ids has {VOCABULARY} at 1", str(VOCABULARY))),
        ((1, 2**32 - 1), 4, {}, (str(2**32 - 1),)),
        (prompt(5), 0, {}, ("max_new_tokens is 0", f"[1, {CONTEXT - 5}]")),
        (prompt(5), CONTEXT, {}, (f"max_new_tokens is {CONTEXT}", f"[1, {CONTEXT - 5}]")),
        (prompt(5), 4, {"temperature": -1.0}, ("temperature", "-1")),
        (prompt(5), 4, {"temperature": float("nan")}, ("temperature", "nan")),
        (prompt(5), 4, {"temperature": 1.0, "top_p": 1.5}, ("top_p", "1.5")),
    ],
    ids=["empty", "too long", "id too large", "id far too large", "no tokens", "too many", "cold", "nan", "top_p"],
)
async def test_an_invalid_request_is_rejected_in_one_line(
    serving: Serving, token_ids: tuple[int, ...], new: int, sampling: dict[str, Any], words: tuple[str, ...]
) -> None:
    async with serving.caller() as caller:
        answer = await caller.ask(token_ids, new, sampling=pb.SamplingParams(**sampling))
    assert answer.code is INVALID, f"{answer.code}: {answer.details}"
    assert "\n" not in answer.details
    for word in words:
        assert word in answer.details


async def test_a_request_without_a_prompt_or_with_a_long_id_is_rejected(serving: Serving) -> None:
    async with serving.caller() as caller:
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await caller.stub.Generate(pb.GenerateRequest(max_new_tokens=4)).read()
        assert (rejected.value.code(), "prompt is missing" in (rejected.value.details() or "")) == (INVALID, True)
        answer = await caller.ask(prompt(5), answer=Answer(request_id="x" * 129))
        assert answer.code is INVALID
        assert answer.details.startswith("request_id has 129 characters")


async def page_of(node: ClusterNode) -> str:
    """Return the text of `/metrics`."""
    code, page = await node.http("/metrics")
    assert code == 200, page
    return page


def metric(page: str, name: str, **labels: str) -> float:
    """Return the sum of the samples with this name and these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def test_counters_agree_with_the_statistics_of_requests(serving: Serving) -> None:
    prefill, decode = serving.cluster.nodes
    await serving.until_idle()
    before = {node.role: await page_of(node) for node in (prefill, decode)}
    prompts = [prompt(num_tokens, 50 + num_tokens) for num_tokens in (7, 128, 200, 431)]
    async with serving.caller() as caller:
        answers = await asyncio.gather(*(caller.ask(token_ids) for token_ids in prompts))
    stats = [answer.done.stats for answer in answers if answer.done is not None]
    assert len(stats) == len(prompts)
    num_bytes, writes = sum(one.bytes for one in stats), sum(one.writes for one in stats)

    async def are_counted() -> bool:
        pages = {node.role: await page_of(node) for node in (prefill, decode)}

        def grown(name: str, role: str) -> float:
            return metric(pages[role], name) - metric(before[role], name)

        return (
            [grown("kvferry_transferred_bytes_total", role) for role in pages] == [num_bytes, num_bytes]
            and grown("kvferry_writes_total", "prefill") == writes
            and [grown("kvferry_requests_total", role) for role in pages] == [len(prompts), len(prompts)]
            and grown("kvferry_time_to_first_token_seconds_count", "decode") == len(prompts)
            and metric(pages["prefill"], "kvferry_queued_requests") == 0
            and metric(pages["decode"], "kvferry_running_requests") == 0
            and metric(pages["decode"], "kvferry_ring_live_bytes") == 0
            and metric(pages["decode"], "kvferry_ring_quarantined_bytes") == 0
        )

    await until(are_counted, f"{num_bytes} bytes in {writes} writes counted by both nodes")
    await serving.until_idle()


async def test_the_memory_plan_is_in_status_and_in_metrics(serving: Serving) -> None:
    for node, transfer_line in ((serving.cluster.prefill, "staging"), (serving.cluster.decode, "ring")):
        status = await status_of(node)
        assert status is not None
        plan = status.memory_plan
        lines = {line.name: line for line in plan.lines}
        assert sum(line.planned_bytes for line in plan.lines if not line.inside) == plan.device_bytes
        for name in ("weights", transfer_line):
            assert lines[name].planned_bytes == lines[name].real_bytes > 0
        assert lines["pool_full"].real_bytes == pytest.approx(lines["pool_full"].planned_bytes, rel=0.01)
        assert not plan.warnings
        page = await page_of(node)
        for rank in range(status.instance.shard.tp_size):
            for name, line in lines.items():
                assert metric(page, "kvferry_memory_planned_bytes", line=name, rank=str(rank)) == line.planned_bytes
            real_bytes = metric(page, "kvferry_memory_real_bytes", line="pool_full", rank=str(rank))
            assert real_bytes == pytest.approx(lines["pool_full"].planned_bytes, rel=0.01)


async def test_health_readiness_and_reflection_report_a_serving_node(serving: Serving) -> None:
    for node, service in (
        (serving.cluster.prefill, "kvferry.v1.PrefillControl"),
        (serving.cluster.decode, "kvferry.v1.DecodeControl"),
    ):
        assert await node.http("/healthz") == (200, "ok\n")
        assert await node.http("/readyz") == (200, "ready\n")
        assert (await node.http("/nothing"))[0] == 404
        peer = PeerChannel(node.address, serving.security())
        try:
            channel = await peer.ready()
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", service):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            listed = {found.name async for answer in call for found in answer.list_services_response.service}
            assert {service, "grpc.health.v1.Health"} <= listed
        finally:
            await peer.close()


async def test_a_status_page_shows_the_status_of_both_nodes(serving: Serving) -> None:
    prefill, decode = serving.cluster.nodes
    async with serving.caller() as caller:
        assert (await caller.ask(prompt(200, 31))).code is grpc.StatusCode.OK
    code, page = await decode.http("/")
    assert code == 200 and page.lower().startswith("<!doctype html>")
    content: dict[str, Any] = {}

    async def has_the_writes() -> bool:
        content.update(json.loads((await decode.http("/status.json"))[1]))
        uses = [use for other in content["others"] for use in other["status"]["ranks"][0]["link_uses"]]
        return bool(uses) and all(use["written_bytes"] > 0 and use["busy_s"] > 0 for use in uses)

    await until(has_the_writes, "the bytes written to the decode node")
    assert content["address"] == decode.address
    assert content["node"]["role"] == "decode" and content["node"]["ready"] is True
    (other,) = content["others"]
    assert other["address"] == prefill.address and other["error"] == ""
    assert other["status"]["role"] == "prefill"
    assert [link["peer_incarnation"] for link in content["node"]["links"]].count(other["status"]["instance"]["incarnation"]) >= 1


async def test_every_metric_of_charts_and_alerts_is_served(serving: Serving) -> None:
    async with serving.client(side="prefill") as peer:  # the metric of refused calls exists only after the first refusal
        with pytest.raises(ConfigError, match=r"may not call NodeControl/Drain"):
            await peer.drain(budget_s=1)
    served = {
        sample.name
        for node in serving.cluster.nodes
        for family in text_string_to_metric_families(await page_of(node))
        for sample in family.samples
    }
    charts = (line.expr for dashboard in DASHBOARDS for row in dashboard.rows for chart in row.charts for line in chart.lines)
    alerts = (alert.expr for group in ALERTS for alert in group.alerts)
    read = {name for expr in (*charts, *alerts) for name in re.findall(r"\bkvferry_[a-z_]+", expr)}
    assert len(read) > 50 and read <= served, read - served
