"""Results of a request that are queued for its caller."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb

Progress = pb.GeneratedTokens | pb.GenerateDone | TransferError

MAX_JOINED_TOKENS: Final = 256

MESSAGES_PER_S: Final = 3_000
"""Maximum rate of messages with tokens over all streams of a leader. One message takes about 100 us of the leader's CPU time, and
the leader sends the next step only after the messages of the previous one."""


class ProgressQueue(asyncio.Queue[Progress]):
    """A queue that joins consecutive tokens that wait in it."""

    def _put(self, item: Progress) -> None:
        waiting: deque[Progress] = self._queue  # type: ignore[attr-defined] # as asyncio.PriorityQueue uses it
        last = waiting[-1] if waiting else None
        if (
            isinstance(item, pb.GeneratedTokens)
            and isinstance(last, pb.GeneratedTokens)
            and len(last.token_ids) < MAX_JOINED_TOKENS
        ):
            last.token_ids.extend(item.token_ids)
            last.text += item.text
        else:
            waiting.append(item)


class Pace:
    """Delay the messages of one stream if all streams together would send more than `MESSAGES_PER_S`.

    During a delay, `ProgressQueue` joins the tokens of several steps.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sent_s = 0.0
        self._gap_s = float("inf")  # between the last two messages; 0 if the last one had tokens of several steps

    async def wait(self, num_streams: int) -> None:
        """Return when the next message may be sent.

        Args:
            num_streams: Streams that get tokens.
        """
        pause_s = num_streams / MESSAGES_PER_S
        if self._gap_s < pause_s:
            await asyncio.sleep(self._sent_s + pause_s - self._loop.time())

    def sent(self, num_tokens: int) -> None:
        now_s = self._loop.time()
        self._gap_s = 0.0 if num_tokens > 1 else now_s - self._sent_s
        self._sent_s = now_s
