"""A long request starts in time under endless shorter ones: real prefill leaders and real admission, in virtual time.

The ranks are fakes: a prompt is computed and sent at once, and its decode pages are released when its tokens are generated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from decode_node.admission import Admission
from decode_node.admission import page_needs as decode_needs
from decode_node.offload.tiers import PlaceRequest, Prompt, Tiers
from node_runtime.rank_messages import StepDone
from prefill_node import requests as requests_module
from prefill_node.rank_messages import RunPrefillStep
from prefill_node.requests import PrefillRequests
from prefill_node.scheduler import PrefillScheduler, page_needs
from tests.prefill.leader_world import new_join
from tests.runtime.virtual_time import VirtualTimeLoop, run_in_virtual_time
from transfer.chunk import ChunkPlan
from transfer.config import PrefillLimitsConfig
from transfer.connector import outgoing as outgoing_module
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import TransferSent
from transfer.connector.outgoing import Transfer
from transfer.errors import PeerUnreachable, TransferError
from transfer.layer_groups import PageCounts, layer_groups
from transfer.layout import DType, KVLayout
from transfer.send.events import SentStats

PAGE_SIZE, CHUNK = 16, 128
DECODE_PAGES, LONG_PAGES, SHORT_PAGES = 100, 60, 10
NEW_TOKENS = 16
SHORT_EVERY_S = 0.1  # on average: a little more than the decode node can serve, which holds ten for 1.2 s
GENERATES_S = (0.9, 1.5)
GROUPS = layer_groups(KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=DType.FLOAT16))


class Cluster:
    """One decode node of `DECODE_PAGES` pages, and prefill nodes with larger pools that share its requests."""

    def __init__(self, loop: VirtualTimeLoop, seed: int, *, num_nodes: int, max_running: int = 64) -> None:
        self._loop = loop
        self._chance = random.Random(seed)
        self.admission = Admission(
            pool_pages=PageCounts((DECODE_PAGES,)),
            needs=decode_needs(GROUPS, PAGE_SIZE),
            max_running=max_running,
            now_s=loop.time,
        )
        self._tiers = Tiers(self.admission)
        self._accepted_s: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}
        self._join = new_join()
        self.nodes: list[PrefillRequests] = []
        for index in range(num_nodes):
            node = PrefillRequests(
                PrefillScheduler(
                    pool_pages=PageCounts((10 * DECODE_PAGES,)),
                    needs=page_needs(GROUPS, PAGE_SIZE, chunk_tokens=CHUNK),
                    chunk_tokens=CHUNK,
                    max_step_tokens=1_000_000,
                    max_running=64,
                ),
                num_ranks=1,
                limits=PrefillLimitsConfig(max_queued_requests=1000, step_timeout_s=60.0),
                broadcast=self._ranks_of(index),
                reserve=self._reserve,
                on_broken=pytest.fail,
                on_outcome=lambda outcome: None,
            )
            node.start()
            self.nodes.append(node)

    def submit(self, name: str, num_pages: int) -> Transfer:
        num_tokens = num_pages * PAGE_SIZE - NEW_TOKENS
        self._accepted_s[name], self._num_tokens[name] = self._loop.now_s, num_tokens
        node = self._chance.choice(self.nodes)
        request = Transfer(transfer_id=name, token_ids=(1,) * num_tokens, join=self._join, plan=self._join.plan)
        node.submit(request)
        return request

    async def _reserve(self, join: Join, request_id: str, plan: ChunkPlan) -> Reservation:
        await asyncio.sleep(self._chance.uniform(0.001, 0.01))  # the call
        place = self._tiers.place(
            PlaceRequest(
                request_id=request_id,
                prompt=Prompt(token_ids=(1,) * self._num_tokens[request_id]),
                max_new_tokens=NEW_TOKENS,
                chunk_tokens=CHUNK,
                may_skip=False,
                accepted_s=self._accepted_s[request_id],
            )
        )
        return Reservation(is_reserved=place is not None)

    def _ranks_of(self, index: int) -> Callable[[object], None]:
        def hear(message: object) -> None:
            if isinstance(message, RunPrefillStep):
                self._loop.call_later(0.002, self._computed, self.nodes[index], message)

        return hear

    def _computed(self, node: PrefillRequests, step: RunPrefillStep) -> None:
        last = [part.request_id for part in step.parts if part.is_last]
        node.on_step_done(0, StepDone(step=step.step, tokens=dict.fromkeys(last, 1), compute_s=0.0))
        for name in last:
            node.on_pages_released(0, name)
            node.on_sent(0, TransferSent(transfer_id=name, stats=SentStats()))
            self._loop.call_later(self._chance.uniform(*GENERATES_S), self._tiers.gone, name)

    async def close(self) -> None:
        for node in self.nodes:
            await node.close(PeerUnreachable("the test is over"))


async def wait_of_a_long_request(cluster: Cluster, *, has_others_later: bool) -> float:
    """Seconds until the long request starts. Without younger requests it is what first come, first served takes."""
    num_short = 0

    def submit_short() -> None:
        nonlocal num_short
        num_short += 1
        cluster.submit(f"short-{num_short}", SHORT_PAGES)

    for _ in range(12):
        submit_short()  # ten of them fill the pool
    await asyncio.sleep(1.0)
    long = cluster.submit("long", LONG_PAGES)

    async def submit_more() -> None:
        while True:
            submit_short()
            await asyncio.sleep(SHORT_EVERY_S)

    others = asyncio.ensure_future(submit_more()) if has_others_later else None
    started = await long.progress.get()
    if others is not None:
        others.cancel()
    assert not isinstance(started, TransferError), started
    return started.started.queue_s


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_it_waits_no_longer_than_twice_the_time_of_first_come_first_served(
    seed: int, num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s = []
    for has_others_later in (False, True):

        async def main(loop: VirtualTimeLoop, has_others_later: bool = has_others_later) -> None:
            cluster = Cluster(loop, seed, num_nodes=num_nodes)
            waits_s.append(await wait_of_a_long_request(cluster, has_others_later=has_others_later))
            await cluster.close()

        run_in_virtual_time(main, monkeypatch, requests_module, outgoing_module)
    fair_s, wait_s = waits_s
    assert 0.1 < fair_s < 2 * GENERATES_S[1]
    assert wait_s <= 2 * fair_s
