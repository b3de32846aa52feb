"""Attempts that wait for room, and when the scheduler is asked again for each."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from typing import Any, Final, Generic

from transfer.connector.attempt import Attempt, PromptT

ASK_AGAIN_S: Final = 0.5
"""Longest pause between two questions to the scheduler about room. `decode_node.admission.WAITS_S` is longer, so that a waiting
request keeps its place."""

ASKED_AT_ONCE: Final = 32
"""Attempts for which the scheduler is asked again at a change. A question takes up to 0.3 ms of the loop, and hundreds can wait.
The others follow within `ASK_AGAIN_S`."""

MOST_ASKED: Final = 256
"""Attempts for which the scheduler is asked again within `ASK_AGAIN_S`, those of the oldest prompts. With 1,024 prefill nodes,
8,000 can wait, and would take all of the loop's time."""


class RoomWaits(Generic[PromptT]):
    """Wakes waiting attempts when room has changed, and every `ASK_AGAIN_S`, those of the oldest prompts first.

    Owned by the leader's loop. It is true while an attempt waits.
    """

    def __init__(self) -> None:
        self._waiting: dict[Attempt[PromptT], asyncio.Future[None]] = {}  # done when the scheduler is to be asked again
        self._by_age: list[Attempt[PromptT]] = []  # the same attempts, the oldest prompt's first
        self._is_asking_again = False
        self._asking_again: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    async def until_changed(self, attempt: Attempt[PromptT]) -> None:
        """Wait until the scheduler is to be asked again for an attempt."""
        changed = self._waiting[attempt] = asyncio.get_running_loop().create_future()
        insort(self._by_age, attempt, key=_age)
        if self._asking_again is None:
            self._asking_again = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._ask_next_again, 0)
        try:
            await changed
        finally:
            del self._waiting[attempt]
            del self._by_age[bisect_left(self._by_age, _age(attempt), key=_age)]

    def room_changed(self) -> None:
        """Ask the scheduler again for attempts that wait for room, the oldest prompts first, once in a turn of the loop."""
        if self._waiting and not self._is_asking_again:
            self._is_asking_again = True
            asyncio.get_running_loop().call_soon(self._ask_oldest_again)

    def ask_again(self, attempt: Attempt[PromptT]) -> None:
        """Ask the scheduler again for one attempt, if it waits for room."""
        changed = self._waiting.get(attempt)
        if changed is not None and not changed.done():
            changed.set_result(None)

    def close(self) -> None:
        """Ask no more at intervals. The waits end with their tasks."""
        if self._asking_again is not None:
            self._asking_again.cancel()

    def _ask_oldest_again(self) -> None:
        self._is_asking_again = False
        self._ask_some_again(0)

    def _ask_some_again(self, begin: int) -> None:
        for attempt in self._by_age[begin : begin + ASKED_AT_ONCE]:
            self.ask_again(attempt)

    def _ask_next_again(self, begin: int) -> None:
        """Ask again for the attempts at `begin` in the order of age, and for the next ones a moment later."""
        self._asking_again = None
        if self._by_age:
            self._ask_some_again(begin)
            pause_s = ASK_AGAIN_S * ASKED_AT_ONCE / MOST_ASKED
            self._asking_again = asyncio.get_running_loop().call_later(
                pause_s, self._ask_next_again, (begin + ASKED_AT_ONCE) % MOST_ASKED
            )


def _age(attempt: Attempt[Any]) -> tuple[float, str]:
    """Return the key of the order of age. Ids are unique."""
    return attempt.prompt.accepted_s, attempt.transfer_id
