"""The events that daemons and engines return to the caller of `Prefill`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from transfer.connector.outgoing import EngineNote, Progress, PromptFirstToken, PromptSent, PromptStarted
from transfer.connector.prefill_calls import prefill_events
from transfer.errors import Preempted, TransferAborted, TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.send.events import SentStats


@dataclass
class Prompt:
    """A prompt that delivers all of its progress at once."""

    items: list[Progress]
    queued_s: float = 0.0
    is_started: bool = True
    progress: asyncio.Queue[Progress] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        for item in self.items:
            self.progress.put_nowait(item)


async def told(prompt: Prompt) -> tuple[list[pb.PrefillEvent], list[float], list[TransferError]]:
    """Return the events, the values of the queue metric, and the errors passed to `give_up`."""
    waits: list[float] = []
    ends: list[TransferError] = []
    metrics = cast(Any, SimpleNamespace(histogram=lambda name: SimpleNamespace(observe=waits.append)))
    events = [event async for event in prefill_events(prompt, cast(Any, None), give_up=ends.append, metrics=metrics)]
    return events, waits, ends


async def test_bytes_add_up_over_the_ranks_and_times_are_those_of_the_slowest() -> None:
    parts = (
        SentStats(num_bytes=10, writes=1, writes_without_staging=8, transfer_s=0.5, exposed_s=0.25, resends=1),
        SentStats(num_bytes=20, writes=2, writes_without_staging=16, transfer_s=1.5, exposed_s=0.125),
    )
    begun = [
        PromptStarted(queue_s=2.0),
        PromptFirstToken(token_id=7, compute_s=3.0),
        EngineNote(payload=b"n"),
        PromptSent(stats=parts),
    ]
    (started, token, note, sent), waits, ends = await told(Prompt([*begun, PromptSent(stats=parts)]))
    assert (started.started.queue_s, waits) == (2.0, [2.0])
    assert (token.first_token.token_id, token.first_token.compute_s, note.note.payload) == (7, 3.0, b"n")
    stats = sent.sent.stats
    assert (stats.bytes, stats.writes, stats.writes_without_staging, stats.resends) == (30, 3, 24, 1)
    assert (stats.transfer_s, stats.exposed_s) == (1.5, 0.25)
    assert [type(end) for end in ends] == [TransferAborted], "a prompt that is over takes no notice"


async def test_the_wait_of_a_prompt_that_never_started_is_counted_as_well() -> None:
    (event,), waits, _ = await told(Prompt([Preempted("its pages are taken back")], is_started=False))
    assert event.WhichOneof("event") == "preempted" and len(waits) == 1
