"""A worker's part of the vLLM connector: tells kvferry what has been computed, and vLLM what has been sent and received.

Nothing of vLLM is imported; every method is called by vLLM's model runner, on its thread, and returns at once, but for `preempt`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from kvferry.engines.connector_rank import ConnectorRank
from kvferry.engines.vllm_scheduler import StepMessage, request_id_of
from transfer.connector.incoming_rank import Settled
from transfer.connector.outgoing_rank import Free
from transfer.engine_types import DeviceEvent

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Results:
    """What has ended since the last step; requests by vLLM's ids.

    Args:
        sent: Their blocks are not read any more.
        received: Their KV is there, or will not come; nothing writes to their blocks.
        failed: Those of `received` whose KV will not come.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """See the module's docstring.

    Args:
        rank: This worker's.
        page_tables: vLLM's block ids of a request, by KV cache group -> its page tables.
        record: Makes an event behind what the device was given so far; None: the device computes while it is waited for.
    """

    def __init__(
        self,
        rank: ConnectorRank,
        page_tables: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]],
        *,
        record: Callable[[], DeviceEvent] | None = None,
    ) -> None:
        self._rank = rank
        self._page_tables = page_tables
        self._record = record
        self._tables: dict[str, list[list[int]]] = {}  # of requests that are handed over
        self._held: set[str] = set()  # whose blocks the scheduler keeps until they are said to be sent

    def preempt(self, plan: StepMessage) -> None:
        """Before the step: blocks of these requests are about to be overwritten."""
        if plan.preempted:
            self._rank.pause(plan.preempted, "the prefill side's engine has preempted the request, and computes it again")

    def computed(self, plan: StepMessage) -> None:
        """After the step: its KV is in the cache, or will be behind what the device was given."""
        event = self._record() if self._record is not None and plan.steps else None
        for step in plan.steps:
            new = self._page_tables(step.blocks) if step.blocks else ()
            tables = self._tables.get(step.name)
            if tables is None or step.is_fresh:
                tables = self._tables[step.name] = [[] for _ in new]
            for table, pages in zip(tables, new, strict=False):
                table.extend(pages)
            self._rank.progress(step.name, tables, step.num_computed, event)
        for end in plan.ends:
            self._tables.pop(end.name, None)
            if end.is_held:
                self._held.add(end.name)
            self._rank.finish(end.name)

    def results(self) -> Results:
        """What has ended since it was last asked."""
        results = Results()
        for news in self._rank.poll_events():
            match news:
                case Free(name=name, failure=failure):
                    if failure:
                        log.warning("prompt_not_sent", request_id=request_id_of(name), reason=failure)
                    if name in self._held:
                        self._held.discard(name)
                        results.sent.add(request_id_of(name))
                case Settled(name=name, failure=failure):
                    request_id = request_id_of(name)
                    if failure:
                        log.warning("prompt_not_received", request_id=request_id, reason=failure)
                        results.failed.add(request_id)
                    results.received.add(request_id)
        return results
