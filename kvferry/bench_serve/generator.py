"""Sends requests when they are due, independent of earlier ones, and records the answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvferry.bench_serve.summary import Lateness, Moved, Record, Spread
from kvferry.bench_serve.workload import Choice, Planned
from kvferry.cli.node_client import NodeClient, code_name
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

TICK_S: Final = 0.02
"""Interval at which the generator checks the delay of its own loop."""


class OpenLoop:
    """One run of one rate. `records` is valid afterwards, and also if the run is cancelled.

    Args:
        clients: At least one, by address.
        timeout_s: Deadline of each request.
        max_lateness_s: See `Lateness`.
    """

    def __init__(self, clients: Mapping[str, NodeClient], *, choice: Choice, timeout_s: float, max_lateness_s: float) -> None:
        self._clients = dict(clients)
        self._choice = choice
        self._timeout_s = timeout_s
        self._max_lateness_s = max_lateness_s
        self._outstanding = dict.fromkeys(self._clients, 0)
        self._num_sent = 0
        self._began_s = 0.0
        self._ticks_s: list[float] = []
        self._cpu_s = self._ran_s = 0.0
        self.records: list[Record] = []

    async def run(self, planned: Sequence[Planned], make: Callable[[int, Planned], pb.GenerateRequest]) -> None:
        """Send all requests, and wait for the last one. All are made before the first is sent."""
        requests = [make(index, one) for index, one in enumerate(planned)]
        gc.collect()
        gc.freeze()  # so that the collector does not walk over these objects during the measurement
        tasks: list[asyncio.Task[None]] = []
        ticker = asyncio.create_task(self._tick())
        cpu_s = time.process_time()
        self._began_s = time.monotonic()
        try:
            for index, (one, request) in enumerate(zip(planned, requests, strict=True)):
                wait_s = one.at_s - self._now_s()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                record = Record(
                    index=index,
                    target=self._choose(),
                    due_s=one.at_s,
                    prompt_tokens=one.prompt_tokens,
                    is_warm_up=one.is_warm_up,
                )
                self.records.append(record)
                tasks.append(asyncio.create_task(self._send(record, request)))
                if wait_s <= 0 and index % 64 == 63:
                    await asyncio.sleep(0)  # late: give a turn to requests that were started
            await asyncio.gather(*tasks)
        finally:
            ticker.cancel()
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(ticker, *tasks, return_exceptions=True)
            self._ran_s = self._now_s()
            self._cpu_s = time.process_time() - cpu_s
            gc.unfreeze()

    def lateness(self) -> Lateness:
        """Return the delays of a run that has ended."""
        return Lateness(
            sends_s=Spread.of(record.lateness_s for record in self.records if record.sent_s is not None),
            loop_s=Spread.of(self._ticks_s),
            cpu_share=self._cpu_s / self._ran_s if self._ran_s > 0 else 0.0,
            limit_s=self._max_lateness_s,
        )

    @property
    def ran_s(self) -> float:
        """Return the seconds from the run's start to its end."""
        return self._ran_s

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _choose(self) -> str:
        names = list(self._clients)
        first = self._num_sent % len(names)
        self._num_sent += 1
        if self._choice is Choice.ROUND_ROBIN:
            return names[first]
        # Equal nodes take turns. Otherwise the first one would get all of a light load.
        turns = names[first:] + names[:first]
        return min(turns, key=self._outstanding.__getitem__)

    async def _send(self, record: Record, request: pb.GenerateRequest) -> None:
        self._outstanding[record.target] += 1
        record.sent_s = self._now_s()
        left_s = max(self._timeout_s - record.lateness_s, 1e-3)
        try:
            calling = self._clients[record.target].generate(request, accept_timeout_s=left_s, timeout_s=left_s)
            async with contextlib.aclosing(calling) as events:
                async for event in events:
                    match event.WhichOneof("event"):
                        case "tokens":
                            record.token_s.append(self._now_s())
                            record.num_tokens += len(event.tokens.token_ids)
                        case "done":
                            record.ended_s = self._now_s()
                            _take_done(record, event.done)
        except TransferError as error:
            record.ended_s = self._now_s()
            record.failure, record.reason = code_name(error), str(error)
        finally:
            self._outstanding[record.target] -= 1

    async def _tick(self) -> None:
        """Record the delays of this loop: any answer may have been seen that late."""
        while True:
            due_s = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._ticks_s.append(max(0.0, time.monotonic() - due_s))


def _take_done(record: Record, done: pb.GenerateDone) -> None:
    if not record.token_s:  # there is no time to measure; no node completes a request without a token
        record.failure, record.reason = "NO_TOKENS", f"{record.target}: the request ended well without a token"
        return
    stats = done.stats
    record.moved = Moved(
        node_ttft_s=done.ttft_s,
        transfer_s=stats.transfer_s,
        exposed_s=stats.exposed_s,
        num_bytes=stats.bytes,
        writes=stats.writes,
        resends=stats.resends,
        prefill_node=done.prefill_node,
        retries=done.retries,
        cached_tokens=done.cached_tokens,
    )
