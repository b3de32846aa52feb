"""What SGLang's senders and receivers ask of kvferry, as states of prompts; needs no SGLang.

Every scheduler of an SGLang engine runs the same steps for the same prompts in the same order. So each has these objects, under
equal names, and only the one with the leader speaks for all. A scheduler asks for the state of each prompt again and again
(`poll`), and the schedulers take the least of what they were told: a prompt has failed when it has for one of them, and is done
when it is for all.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

import structlog

from kvferry.engines.sglang_layout import page_table
from transfer.connector.incoming_rank import Settled
from transfer.connector.outgoing_rank import Free, GivenUp, Wanted
from transfer.engine_types import DeviceEvent
from transfer.errors import IntegrityError, TransferError

ABORTED: Final = "the engine gave the request up"

log = structlog.get_logger(__name__)


class Poll(IntEnum):
    """States of a transfer, with the numbers that SGLang gives them (KVPoll)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Rank(Protocol):
    """What is used of a `ConnectorRank`."""

    def progress(
        self, name: str, tables: Sequence[Sequence[int]], num_computed: int, event: DeviceEvent | None = None
    ) -> None: ...
    def finish(self, name: str) -> None: ...
    def poll_events(self) -> list[Any]: ...


class SourceCalls(Protocol):
    """What is used of a `ConnectorLeader` on the prefill side."""

    def offer(self, name: str, transfer_id: str, token_ids: Sequence[int]) -> None: ...
    def begin(self, name: str) -> None: ...
    def finish(self, name: str, *, first_token: int | None = None, note: bytes | None = None) -> None: ...
    def withdraw(self, name: str, reason: str) -> None: ...


class TargetCalls(Protocol):
    """What is used of a `ConnectorLeader` on the decode side."""

    def want(
        self,
        name: str,
        transfer_id: str,
        source: str,
        token_ids: Sequence[int],
        *,
        start_token: int = 0,
        needs_note: bool = False,
    ) -> None: ...
    def bind(self, name: str, tables: Sequence[Sequence[int]]) -> None: ...
    def cancel(self, name: str, reason: str) -> None: ...


def pack_note(fields: Sequence[bytes]) -> bytes:
    """What prefill's engine tells decode's beside the KV (first token, log probabilities): one row of each metadata buffer."""
    return struct.pack(f"<{len(fields) + 1}I", len(fields), *map(len, fields)) + b"".join(fields)


def unpack_note(note: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The rows again.

    Args:
        sizes: Bytes of a row of each of decode's own metadata buffers.

    Raises:
        IntegrityError: The rows are not of these sizes: the two engines have other metadata.
    """
    found: tuple[int, ...] = ()
    if len(note) >= 4:
        (count,) = struct.unpack_from("<I", note)
        if len(note) >= 4 * (count + 1):
            found = struct.unpack_from(f"<{count}I", note, 4)
    begin = 4 * (len(found) + 1)
    if list(found) != list(sizes) or len(note) != begin + sum(found):
        raise IntegrityError(
            f"prefill's metadata has rows of {list(found)} bytes in {len(note)}; decode's has {list(sizes)}: both engines must "
            "run with the same options for sampling masks, checksums and speculation"
        )
    rows: list[bytes] = []
    for size in found:
        rows.append(note[begin : begin + size])
        begin += size
    return rows


class OutgoingPrompts:
    """The prompts of a prefill scheduler.

    Args:
        rank: This scheduler's kvferry.
        leader: The instance's; None on the other ranks.
        page_size: Of the pool.
        read_note: The metadata of a request, by its index.
        timeout_s: Longest wait for a decode side to ask.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        rank: Rank,
        leader: SourceCalls | None,
        page_size: int,
        read_note: Callable[[int], bytes],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.leader = leader
        self.page_size = page_size
        self.read_note = read_note
        self.timeout_s = timeout_s
        self.clock = clock
        self._prompts: dict[str, OutgoingPrompt] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, room: int) -> OutgoingPrompt:
        self._num_added += 1  # alike on all ranks, as they add the same prompts
        prompt = OutgoingPrompt(self, f"{room}.{self._num_added}", str(room))
        self._prompts[prompt.name] = prompt
        return prompt

    def forget(self, name: str) -> None:
        """Nothing will be heard of it."""
        del self._prompts[name]

    def look(self) -> None:
        """Take note of what has happened."""
        for news in self.rank.poll_events():
            prompt = self._prompts.get(news.name)
            if prompt is None:
                continue
            match news:
                case Wanted():
                    prompt.on_wanted(news.start_token)
                case GivenUp():
                    prompt.fail(news.failure)
                case Free():
                    del self._prompts[news.name]
                    prompt.on_free(news.failure)


class OutgoingPrompt:
    """One prompt, from the moment that SGLang is given it until nothing reads its pages."""

    def __init__(self, prompts: OutgoingPrompts, name: str, transfer_id: str) -> None:
        self.name = name
        self.failure = ""
        self.start_token = 0
        self._prompts = prompts
        self._transfer_id = transfer_id
        self._state = Poll.BOOTSTRAPPING
        self._is_offered = False
        self._is_finished = False
        self._num_pages: int | None = None  # that will be sent; known once the engine has pages
        self._note_index = -1
        self._pages: list[int] = []
        self._num_computed = 0
        self._deadline_s = prompts.clock() + prompts.timeout_s

    @property
    def num_pages_sent(self) -> int:
        return len(self._pages)

    def offer(self, token_ids: Sequence[int]) -> None:
        """SGLang was given the prompt."""
        self._is_offered = True
        if self._prompts.leader is not None:
            self._prompts.leader.offer(self.name, self._transfer_id, token_ids)

    def poll(self) -> Poll:
        self._prompts.look()
        if self._state is Poll.BOOTSTRAPPING and self._prompts.clock() > self._deadline_s:
            self.fail(f"no decode engine has asked for it within {self._prompts.timeout_s:g} s")
        return self._state

    def begin(self, num_pages: int, note_index: int) -> None:
        """A decode side waits, and the engine takes the prompt up: `num_pages` of its pages hold what is to be moved."""
        self._num_pages, self._note_index = num_pages, note_index
        self._num_computed = self.start_token
        if self._prompts.leader is not None:
            self._prompts.leader.begin(self.name)

    def send(self, pages: Sequence[int], num_tokens: int, event: DeviceEvent | None) -> None:
        """The next `num_tokens` tokens are computed, behind `event`, and lie in `pages`; the last fill up `begin`'s number."""
        if self._is_finished or self._num_pages is None:
            return
        self._pages.extend(int(page) for page in pages)
        self._num_computed += num_tokens
        self._state = max(self._state, Poll.TRANSFERRING)
        try:
            table = page_table(self._pages, start_token=self.start_token, page_size=self._prompts.page_size)
        except TransferError as error:
            self.fail(str(error))
            return
        self._prompts.rank.progress(self.name, [table], self._num_computed, event)
        if len(self._pages) == self._num_pages:
            if self._prompts.leader is not None:
                self._prompts.leader.finish(self.name, note=self._prompts.read_note(self._note_index))
            self._finish()

    def fail(self, reason: str = ABORTED) -> None:
        """The engine gives it up. One that the engine had begun has failed once nothing reads its pages, else at once."""
        if self._state in (Poll.FAILED, Poll.SUCCESS):
            return
        self.failure = self.failure or reason
        if self._num_pages is None:
            self._state = Poll.FAILED
        if not self._is_offered:
            self._prompts.forget(self.name)
            return
        if self._prompts.leader is not None:
            self._prompts.leader.withdraw(self.name, self.failure)
        self._finish()

    def _finish(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._prompts.rank.finish(self.name)

    # News

    def on_wanted(self, start_token: int) -> None:
        if self._state is Poll.BOOTSTRAPPING:
            self._state, self.start_token = Poll.WAITING_FOR_INPUT, start_token

    def on_free(self, failure: str) -> None:
        self.failure = self.failure or failure
        if self._state is not Poll.FAILED:
            self._state = Poll.FAILED if self.failure else Poll.SUCCESS


class IncomingPrompts:
    """The prompts of a decode scheduler.

    Args:
        rank: This scheduler's kvferry.
        leader: The instance's; None on the other ranks.
        page_size: Of the pool.
        write_note: Puts a request's metadata at an index. Raises TransferError when it does not fit.
        timeout_s: Longest time from taking pages to having all KV.
        on_failed: Hears of the prefill engine (its bootstrap address) of each prompt that failed.
        clock: Seconds.
    """

    def __init__(
        self,
        *,
        rank: Rank,
        leader: TargetCalls | None,
        page_size: int,
        write_note: Callable[[int, bytes], None],
        timeout_s: float,
        on_failed: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.leader = leader
        self.page_size = page_size
        self.write_note = write_note
        self.timeout_s = timeout_s
        self.on_failed = on_failed
        self.clock = clock
        self._prompts: dict[str, IncomingPrompt] = {}
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, room: int, bootstrap: str) -> IncomingPrompt:
        self._num_added += 1
        return IncomingPrompt(self, f"{room}.{self._num_added}", str(room), bootstrap)

    def look(self) -> None:
        """Take note of what has happened."""
        for news in self.rank.poll_events():
            prompt = self._prompts.pop(news.name, None)
            if prompt is not None and isinstance(news, Settled):
                prompt.on_settled(news.failure, news.note)

    def watch(self, prompt: IncomingPrompt) -> None:
        self._prompts[prompt.name] = prompt


class IncomingPrompt:
    """One prompt, from the moment that SGLang is given it until all its KV is there, or nothing writes to its pages."""

    def __init__(self, prompts: IncomingPrompts, name: str, transfer_id: str, bootstrap: str) -> None:
        self.name = name
        self.failure = ""
        self._prompts = prompts
        self._transfer_id = transfer_id
        self._bootstrap = bootstrap
        self._state = Poll.BOOTSTRAPPING
        self._token_ids: tuple[int, ...] = ()
        self._source = ""
        self._note_index = -1
        self._is_bound = False
        self._is_given_up = False
        self._deadline_s = 0.0

    @property
    def state(self) -> Poll:
        """What `poll` said last."""
        return self._state

    def take(self, token_ids: Sequence[int]) -> None:
        """The prompt whose KV will come."""
        self._token_ids = tuple(token_ids)

    def meet(self, source: str) -> None:
        """`source` is where the prefill engine's kvferry listens (host:port)."""
        if self._state is Poll.BOOTSTRAPPING:
            self._source, self._state = source, Poll.WAITING_FOR_INPUT

    def bind(self, pages: Sequence[int], note_index: int, prefix_tokens: int) -> None:
        """SGLang has taken pages for the prompt; told are those from `prefix_tokens` on, the others hold their KV already."""
        if self._state is not Poll.WAITING_FOR_INPUT or self._is_bound:
            return
        page_size, num_tokens = self._prompts.page_size, len(self._token_ids)
        start_token = prefix_tokens
        if prefix_tokens >= num_tokens:
            # All of it is here. The first token is not, and comes with some KV: the last page's, which goes to SGLang's page for
            # padding, number 0, as `page_table` has it.
            start_token = (num_tokens - 1) // page_size * page_size
            pages = [0]
        try:
            table = page_table(pages, start_token=start_token, page_size=page_size)
        except TransferError as error:
            self._state, self.failure = Poll.FAILED, str(error)
            return
        self._is_bound, self._note_index = True, note_index
        self._deadline_s = self._prompts.clock() + self._prompts.timeout_s
        self._prompts.watch(self)
        leader = self._prompts.leader
        if leader is not None:
            leader.want(self.name, self._transfer_id, self._source, self._token_ids, start_token=start_token, needs_note=True)
            leader.bind(self.name, [table])

    def poll(self) -> Poll:
        self._prompts.look()
        if self._is_bound and self._state is Poll.WAITING_FOR_INPUT and self._prompts.clock() > self._deadline_s:
            self.fail(f"its KV has not come within {self._prompts.timeout_s:g} s")
        return self._state

    def fail(self, reason: str = ABORTED) -> None:
        """SGLang gives it up. One with pages has failed once nothing writes to them, on any rank; others at once."""
        if self._state in (Poll.FAILED, Poll.SUCCESS):
            return
        self.failure = self.failure or reason
        if not self._is_bound:
            self._state = Poll.FAILED
        elif not self._is_given_up:
            self._is_given_up = True
            if self._prompts.leader is not None:
                self._prompts.leader.cancel(self.name, self.failure)

    def on_settled(self, failure: str, note: bytes) -> None:
        self.failure = self.failure or failure
        if not self.failure:
            try:
                self._prompts.write_note(self._note_index, note)
            except TransferError as error:
                self.failure = str(error)
        self._state = Poll.FAILED if self.failure else Poll.SUCCESS
        if failure and not self._is_given_up:
            self._prompts.on_failed(self._bootstrap)
