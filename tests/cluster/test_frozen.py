"""A prefill rank that is frozen, and wakes: its node's leader lives and knows nothing, so the decode side has to act."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc
import pytest

from kvferry.local_cluster import ClusterNode
from tests.cluster.calls import Caller, Reference, prompt, status_of, until, until_arriving, until_idle
from tests.cluster.nodes import open_nodes

pytestmark = pytest.mark.timeout(240)

LONG = 3000
NOTICE_S = 3.0


async def states(decode: ClusterNode) -> dict[str, str]:
    """Address -> state of the decode node's peers."""
    status = await status_of(decode)
    return {peer.address: peer.state for peer in status.peers} if status is not None else {}


async def test_a_frozen_prefill_rank(tmp_path: Path, model: Path, reference: Reference) -> None:
    """Its requests end in time, it is given no others while a healthy node is there, and it is used again once it wakes."""
    with open_nodes(tmp_path) as nodes:
        frozen, healthy = (nodes.launch("prefill", {"model": model}) for _ in range(2))
        await nodes.until_started(frozen, healthy)
        decode = nodes.launch("decode", {"model": model}, frozen.address, healthy.address)
        await nodes.until_started(decode)

        async def all_joined() -> bool:
            return set((await states(decode)).values()) == {"joined"}

        await until(all_joined, "both prefill nodes joined")
        pids, incarnation = frozen.rank_pids, frozen.incarnation
        async with Caller(decode.address) as caller:
            flights = [caller.begin(prompt(LONG, variant), 4)[1] for variant in range(2)]
            await until_arriving(decode)
            os.kill(pids[0], signal.SIGSTOP)
            try:
                since_s = time.monotonic()

                async def is_left() -> bool:
                    return (await states(decode))[frozen.address] in ("lost", "joining")

                await until(is_left, "the frozen rank's node is left", within_s=NOTICE_S)
                for number in range(6):
                    answer = await caller.ask(prompt(60, number))
                    reference.check(prompt(60, number), answer)
                    assert answer.done is not None and answer.done.prefill_node == healthy.address
                answers = await asyncio.gather(*(asyncio.wait_for(flight, 60) for flight in flights))
                (lost,) = [answer for answer in answers if answer.code is grpc.StatusCode.UNAVAILABLE]
                assert lost.ended_s - since_s < NOTICE_S, f"{lost.details} took {lost.ended_s - since_s:.1f} s"
                assert "has lost prefill rank 0" in lost.details, lost.details
                (whole,) = [answer for answer in answers if answer is not lost]
                assert whole.code is grpc.StatusCode.OK and len(whole.tokens) == 4
            finally:
                os.kill(pids[0], signal.SIGCONT)
            await until(all_joined, "the node that woke joined again")
            assert (frozen.rank_pids, frozen.incarnation) == (pids, incarnation), "the same life goes on"
            answers = await asyncio.gather(*(caller.ask(prompt(200, variant)) for variant in range(4)))
            for variant, answer in enumerate(answers):
                reference.check(prompt(200, variant), answer)
            assert {answer.done.prefill_node for answer in answers if answer.done} == {frozen.address, healthy.address}
        await until_idle(decode, frozen, healthy)
