"""The cases of `bench.loop` with 10,000 requests of 1,024 peers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from bench.loop_peers import LAYOUT, instance
from bench.loop_turns import Watch
from node_runtime.rank_messages import StepDone
from prefill_node.rank_messages import RunPrefillStep
from prefill_node.requests import PrefillRequests
from prefill_node.scheduler import PrefillScheduler, page_needs
from transfer.chunk import ChunkPlan
from transfer.config import PrefillLimitsConfig
from transfer.connector.decode_instances import Join, Reservation
from transfer.connector.messages import TransferSent
from transfer.connector.outgoing import Transfer
from transfer.errors import TransferAborted
from transfer.layer_groups import PageCounts, layer_groups
from transfer.send.events import SentStats
from transfer.sizes import Cut

NUM_REQUESTS: Final = 10_000
NUM_PEERS: Final = 1_024
NUM_RUNNING: Final = 32
NUM_COMPLETED: Final = 100
AT_ONCE: Final = 64
"""Prompts and heartbeats in one turn of the loop."""

PAGE_SIZE, CHUNK_TOKENS, PROMPT_TOKENS = 16, 512, 512


def prefill_queue(watch: Watch, *, num_requests: int = NUM_REQUESTS, num_peers: int = NUM_PEERS) -> None:
    """10,000 prompts of 1,024 decode nodes come to a prefill node, which completes 100. Joins have heartbeats, and one is lost.

    Real: `PrefillRequests` and its scheduler. Ranks answer at once.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        steps: deque[RunPrefillStep] = deque()
        questions: deque[asyncio.Future[Reservation]] = deque()

        async def reserve(join: Join, request_id: str, plan: ChunkPlan) -> Reservation:
            questions.append(loop.create_future())
            return await questions[-1]

        scheduler = PrefillScheduler(
            pool_pages=PageCounts((NUM_RUNNING * PROMPT_TOKENS // PAGE_SIZE,)),
            needs=page_needs(layer_groups(LAYOUT), PAGE_SIZE, chunk_tokens=CHUNK_TOKENS),
            chunk_tokens=CHUNK_TOKENS,
            max_step_tokens=CHUNK_TOKENS,
            max_running=NUM_RUNNING,
        )
        requests = PrefillRequests(
            scheduler,
            num_ranks=1,
            limits=PrefillLimitsConfig(max_queued_requests=num_requests, queue_timeout_s=600.0),
            broadcast=lambda message: steps.append(message) if isinstance(message, RunPrefillStep) else None,
            reserve=reserve,
            on_broken=lambda reason: None,
            on_outcome=lambda outcome: None,
        )
        requests.start()
        plan = ChunkPlan(chunk_tokens=CHUNK_TOKENS)
        joins = [
            Join(
                number=number,
                instance=instance(number, tp_size=1),
                address="decode:1",
                attached=loop.create_future(),
                lost=loop.create_future(),
                waiting_for=set(),
                cut=Cut(plan=plan, largest_piece_bytes=1),
            )
            for number in range(1, num_peers + 1)
        ]
        tokens = tuple(range(PROMPT_TOKENS))
        watch.start()
        for number in range(num_requests):
            join = joins[number % num_peers]
            requests.submit(Transfer(transfer_id=f"request {number}", token_ids=tokens, join=join, plan=plan))
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
        num_completed = 0
        while num_completed < NUM_COMPLETED:
            while questions and scheduler.num_running < NUM_RUNNING:
                questions.popleft().set_result(Reservation(is_reserved=True))
                await asyncio.sleep(0)
            for join in joins[:AT_ONCE]:
                requests.others_tokens(join)
            while steps:
                step = steps.popleft()
                token_ids = {part.request_id: 1 for part in step.parts}
                requests.on_step_done(0, StepDone(step=step.step, tokens=token_ids, compute_s=0.0))
                for part in step.parts:
                    requests.on_pages_released(0, part.request_id)
                    requests.on_sent(0, TransferSent(transfer_id=part.request_id, stats=SentStats()))
                    num_completed += 1
            await asyncio.sleep(0)
        requests.abort_join(joins[0], TransferAborted("its node is lost"))
        await asyncio.sleep(0)

    watch.run(main)
