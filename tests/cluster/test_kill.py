"""Processes that die in mid-transfer: requests end with a clear status, nothing stays behind, and the tiers serve again."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest

from kvferry.cluster_spec import Role
from kvferry.local_cluster import LocalCluster
from tests.cluster.calls import Answer, Caller, Reference, prompt, status_of, until, until_arriving, until_idle

pytestmark = pytest.mark.timeout(240)

LONG = 3000
NOTICE_S = 3.0
FADE_S = 2.0
RESTART_S = 60.0  # a second or two on two quiet cores


@pytest.fixture
async def cluster(steady: LocalCluster) -> LocalCluster:
    """Joined, whatever the test before this one did to it."""
    await steady.wait_joined(RESTART_S)
    return steady


def alive(pids: tuple[int, ...]) -> list[int]:
    """Processes of these that have not ended; one that waits to be collected has."""
    living = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            living.append(pid)
    return living


async def fail_mid_transfer(cluster: LocalCluster, victim: int) -> list[Answer]:
    """Kill a process while a request's KV moves and another one waits; both must end UNAVAILABLE in time."""
    async with Caller(cluster.decode.address) as caller:
        flights = [caller.begin(prompt(LONG, variant), 16) for variant in range(2)]
        await until_arriving(cluster.decode)
        assert not any(task.done() for _, task in flights)
        since_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.gather(*(asyncio.wait_for(task, 30) for _, task in flights))
    for answer in answers:
        assert answer.ended_s - since_s < NOTICE_S, f"{answer.code} took {answer.ended_s - since_s:.1f} s"
        assert answer.code is grpc.StatusCode.UNAVAILABLE, f"{answer.code}: {answer.details}"
        assert answer.tokens == []
    return answers


async def serves_again(cluster: LocalCluster, reference: Reference) -> None:
    async with Caller(cluster.decode.address) as caller:
        prompts = [prompt(num_tokens, num_tokens) for num_tokens in (5, 140, 300)]
        answers = await asyncio.gather(*(caller.ask(token_ids) for token_ids in prompts))
    for token_ids, answer in zip(prompts, answers, strict=True):
        reference.check(token_ids, answer)
    await until_idle(cluster.prefill, cluster.decode)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_rank_dies(cluster: LocalCluster, reference: Reference, role: Role) -> None:
    rank = 1
    node, survivor = (cluster.prefill, cluster.decode) if role == "prefill" else (cluster.decode, cluster.prefill)
    pids, incarnation, survivors = node.rank_pids, node.incarnation, survivor.rank_pids
    answers = await fail_mid_transfer(cluster, pids[rank])
    if role == "decode":
        # The leader reports its child, or the prefill node its broken session (before or after its request began there).
        said = re.compile(rf"rank {rank} died: killed by signal 9|decode rank {rank} is lost|with the decode rank is lost")
        assert all(said.search(answer.details) for answer in answers), [answer.details for answer in answers]
    await until(lambda: not alive(pids), "the whole rank group ended", within_s=FADE_S)
    await until_idle(survivor)
    await until(
        lambda: node.ready_file is not None and node.incarnation != incarnation, "another life of the ranks", within_s=RESTART_S
    )
    await cluster.wait_joined(RESTART_S)
    assert survivor.rank_pids == survivors, "the other tier's ranks were to live on"
    status = await status_of(node)
    assert status is not None and status.restarts >= 1
    await serves_again(cluster, reference)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_leader_dies(cluster: LocalCluster, reference: Reference, role: Role) -> None:
    node, survivor = (cluster.prefill, cluster.decode) if role == "prefill" else (cluster.decode, cluster.prefill)
    others = {survivor.pid, *(child.pid for child in psutil.Process(survivor.pid).children(recursive=True))}
    pids = node.rank_pids
    await fail_mid_transfer(cluster, node.pid)
    node.reap(5)
    await until(lambda: not alive(pids), "the ranks of a killed leader ended", within_s=FADE_S)
    await until(lambda: set(cluster.processes()) <= others, "nothing of the killed node is left", within_s=10)
    await until_idle(survivor)
    cluster.launch(role)
    await cluster.wait_joined()
    await serves_again(cluster, reference)
