"""Transfers of prompts as SGLang's schedulers see them: states that they poll. Imports nothing of SGLang.

Every scheduler of an SGLang engine runs the same steps for the same prompts in the same order. Each has these objects, under the
same names, and only the scheduler with the leader calls it. A scheduler polls the state of each prompt repeatedly, and the
schedulers use the minimum of their states. A prompt has failed if it failed for one of them. It is done once it is done for all.
"""

from __future__ import annotations

import math
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import ClassVar, Final

from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from kvferry.engines.sglang_layout import PADDING_PAGE, MorePages, page_tables
from transfer.connector.incoming_rank import Settled
from transfer.connector.outgoing_rank import Free, GivenUp, TransferEvent, Wanted
from transfer.engine_types import DeviceEvent
from transfer.errors import IntegrityError, TransferError
from transfer.layer_groups import GroupKind, LayerGroup

ABORTED: Final = "the engine gave the request up"
MAX_EARLY_PROMPTS: Final = 1024
"""Prompts whose events are kept before SGLang gives the scheduler the prompt. One that fails before `watch` leaves its behind."""

STAGE_WAIT_S: Final = 5.0
"""Longest wait of a later pipeline stage for the leader's message about a prompt that the first stage has started."""


class Poll(IntEnum):
    """States of a transfer, with SGLang's numbers (KVPoll)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


def pack_note(fields: Sequence[bytes]) -> bytes:
    """Pack the metadata that the prefill engine sends beside the KV (first token, log probabilities): one row of each buffer."""
    return struct.pack(f"<{len(fields) + 1}I", len(fields), *map(len, fields)) + b"".join(fields)


def unpack_note(note: bytes, sizes: Sequence[int]) -> list[bytes]:
    """Return the rows of a note.

    Args:
        sizes: Bytes of a row of each of the decode engine's own metadata buffers.

    Raises:
        IntegrityError: The rows have other sizes, because the two engines have other metadata.
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


class SchedulerPrompts:
    """The prompts of one scheduler.

    Args:
        rank: This scheduler's kvferry.
        leader: The instance's; None on the other ranks.
        groups: Groups of layers of the pool.
        page_size: Tokens of a page of the pool.
        timeout_s: Longest wait of a prompt: for a decode engine that asks for it, or for its KV.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        *,
        rank: ConnectorRank,
        leader: ConnectorLeader | None,
        groups: Sequence[LayerGroup],
        page_size: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.leader = leader
        self.groups = tuple(groups)
        self.page_size = page_size
        self.timeout_s = timeout_s
        self.clock = clock
        self._prompts: dict[str, _Prompt] = {}  # prompts for which the rank reports events
        self._early: dict[str, list[TransferEvent | Settled]] = {}  # events that came before `watch`, by prompt, oldest first
        self._num_named = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def new_name(self, room: int) -> str:
        """Return a name for the next prompt, the same on all ranks."""
        self._num_named += 1
        return f"{room}.{self._num_named}"

    def watch(self, prompt: _Prompt) -> None:
        """Pass on the prompt's events, past and future, until its last one."""
        self._prompts[prompt.name] = prompt
        for event in self._early.pop(prompt.name, ()):
            self._pass_on(prompt, event)

    def look(self) -> None:
        """Pass on the events since the last call."""
        for event in self.rank.poll_events():
            if (prompt := self._prompts.get(event.name)) is not None:
                self._pass_on(prompt, event)
                continue
            self._early.setdefault(event.name, []).append(event)
            if len(self._early) > MAX_EARLY_PROMPTS:
                del self._early[next(iter(self._early))]

    def _pass_on(self, prompt: _Prompt, event: TransferEvent | Settled) -> None:
        if isinstance(event, Free | Settled):
            del self._prompts[event.name]
        prompt.on_event(event)


class _Prompt(ABC):
    """One prompt of a scheduler, from the moment that SGLang gets it until kvferry uses none of its pages."""

    late: ClassVar[str]
    """Description of the event that did not happen in time, if the prompt fails by its deadline."""

    def __init__(self, prompts: SchedulerPrompts, room: int) -> None:
        self.name = prompts.new_name(room)
        self.state = Poll.BOOTSTRAPPING
        self.failure = ""
        """Why it failed, or was given up and will fail."""
        self._prompts = prompts
        self._transfer_id = str(room)
        self._token_ids: tuple[int, ...] = ()
        self._note_index = -1  # index of its rows in the metadata buffers
        self._has_pages = False
        self._deadline_s = math.inf

    def poll(self) -> Poll:
        self._prompts.look()
        if self._prompts.clock() > self._deadline_s:
            self.fail(f"{self.late} within {self._prompts.timeout_s:g} s")
        return self.state

    def fail(self, reason: str = ABORTED) -> None:
        """Give the prompt up. It fails at once, or, if it has pages, once no rank reads or writes them."""
        if self.failure or self.state is Poll.SUCCESS:
            return
        self.failure = reason
        if not self._has_pages:
            self.state = Poll.FAILED
        self._give_up()

    def _tables(self, pages: Sequence[int], more_pages: MorePages, start_token: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the prompt's page tables. If the pages cannot hold its tokens, fail the prompt and return None."""
        try:
            return page_tables(
                self._prompts.groups,
                pages,
                more_pages,
                start_token=start_token,
                num_tokens=len(self._token_ids),
                page_size=self._prompts.page_size,
            )
        except TransferError as error:
            self.fail(str(error))
            return None

    def _end(self, failure: str) -> None:
        self.failure = self.failure or failure
        self.state = Poll.FAILED if self.failure else Poll.SUCCESS

    @abstractmethod
    def _give_up(self) -> None:
        """Give the prompt up at the leader and at the rank, if they know it."""

    @abstractmethod
    def on_event(self, event: TransferEvent | Settled) -> None:
        """Handle an event of the rank."""


class OutgoingPrompt(_Prompt):
    """A prompt of a prefill scheduler.

    Args:
        read_note: Returns the metadata at an index.
    """

    late = "no decode engine has asked for it"

    def __init__(self, prompts: SchedulerPrompts, room: int, *, read_note: Callable[[int], bytes]) -> None:
        super().__init__(prompts, room)
        self.start_token = 0
        self._read_note = read_note
        self._is_offered = False
        self._is_finished = False
        self._num_pages = 0  # number of pages that will be sent
        self._pages: list[int] = []
        self._num_computed = 0
        self._deadline_s = prompts.clock() + prompts.timeout_s

    @property
    def num_pages_sent(self) -> int:
        return len(self._pages)

    def offer(self, token_ids: Sequence[int]) -> None:
        """Let a decode engine fetch the prompt."""
        self._is_offered = True
        self._token_ids = tuple(token_ids)
        self._prompts.watch(self)
        if self._prompts.leader is not None:
            self._prompts.leader.offer(self.name, self._transfer_id, token_ids)

    def wait_until_wanted(self) -> int:
        """Return the first token that decode lacks, which the leader reports to all ranks.

        The scheduler of the first pipeline stage decides for all stages, and another stage may hear of it earlier than of the
        leader's message. It waits for the message, which is on its way.
        """
        deadline_s = self._prompts.clock() + STAGE_WAIT_S
        while self.poll() is Poll.BOOTSTRAPPING:
            if self._prompts.clock() > deadline_s:
                self.fail(f"the leader of this engine has not reported the prompt within {STAGE_WAIT_S:g} s")
            time.sleep(0.0002)
        return self.start_token

    def begin(self, num_pages: int, note_index: int) -> None:
        """Start to compute: `num_pages` pages of the engine will hold the tokens from `start_token` on."""
        self._has_pages = True
        self._num_pages, self._note_index = num_pages, note_index
        self._num_computed = self.start_token
        if self._prompts.leader is not None:
            self._prompts.leader.begin(self.name)

    def send(self, pages: Sequence[int], num_tokens: int, event: DeviceEvent | None, more_pages: MorePages | None = None) -> None:
        """Send the next `num_tokens` tokens, which are in `pages` after `event`, until all pages of `begin` are sent.

        Args:
            more_pages: Pages in other pools. SGLang has them with the prompt's last tokens, so windows are sent at the end.
        """
        if self._is_finished or not self._has_pages:
            return
        self._pages.extend(int(page) for page in pages)
        self._num_computed += num_tokens
        self.state = max(self.state, Poll.TRANSFERRING)
        tables = self._tables(self._pages, more_pages or {}, self.start_token)
        if tables is None:
            return
        is_last = len(self._pages) == self._num_pages
        num_ready = self._num_computed
        if not is_last:
            windows = [group for group in self._prompts.groups if group.kind is GroupKind.WINDOW]
            num_ready = min([num_ready, *(group.first_travelling_token(len(self._token_ids)) for group in windows)])
        self._prompts.rank.progress(self.name, tables, num_ready, event)
        if is_last:
            if self._prompts.leader is not None:
                self._prompts.leader.finish(self.name, note=self._read_note(self._note_index))
            self._finish()

    def _give_up(self) -> None:
        if self._is_offered:
            if self._prompts.leader is not None:
                self._prompts.leader.withdraw(self.name, self.failure)
            self._finish()

    def _finish(self) -> None:
        if not self._is_finished:
            self._is_finished = True
            self._prompts.rank.finish(self.name)

    def on_event(self, event: TransferEvent | Settled) -> None:
        match event:
            case Wanted() if self.state is Poll.BOOTSTRAPPING:
                self.state, self.start_token, self._deadline_s = Poll.WAITING_FOR_INPUT, event.start_token, math.inf
            case GivenUp():
                self.fail(event.failure)
            case Free():
                self._end(event.failure)


class IncomingPrompt(_Prompt):
    """A prompt of a decode scheduler.

    Args:
        bootstrap: Bootstrap address of the prefill engine.
        write_note: Writes a prompt's metadata to an index. Raises TransferError if the metadata does not fit.
        on_failed: Called with `bootstrap` if the prompt fails before it is given up here.
    """

    late = "its KV has not come"

    def __init__(
        self,
        prompts: SchedulerPrompts,
        room: int,
        *,
        bootstrap: str,
        write_note: Callable[[int, bytes], None],
        on_failed: Callable[[str], None],
    ) -> None:
        super().__init__(prompts, room)
        self._bootstrap = bootstrap
        self._write_note = write_note
        self._on_failed = on_failed
        self._prefill_address = ""

    def take(self, token_ids: Sequence[int]) -> None:
        """Record the prompt whose KV will arrive."""
        self._token_ids = tuple(token_ids)

    def meet(self, prefill_address: str) -> None:
        """Record the host:port of the prefill engine's kvferry."""
        if self.state is Poll.BOOTSTRAPPING:
            self._prefill_address, self.state = prefill_address, Poll.WAITING_FOR_INPUT

    def bind(self, pages: Sequence[int], note_index: int, prefix_tokens: int, more_pages: MorePages | None = None) -> None:
        """Fetch the KV from `prefix_tokens` on into `pages`. The engine has the KV of the tokens before.

        Args:
            more_pages: Pages of the whole prompt in other pools.
        """
        if self.state is not Poll.WAITING_FOR_INPUT or self._has_pages:
            return
        page_size, num_tokens = self._prompts.page_size, len(self._token_ids)
        start_token, more_pages = prefix_tokens, more_pages or {}
        if prefix_tokens >= num_tokens:
            # The first token is missing, and comes only with some KV. So fetch the last page into SGLang's page for padding.
            start_token = (num_tokens - 1) // page_size * page_size
            pages = [PADDING_PAGE]
            more_pages = {kind: found or [PADDING_PAGE] for kind, found in more_pages.items()}
        tables = self._tables(pages, more_pages, start_token)
        if tables is None:
            return
        self._has_pages, self._note_index = True, note_index
        self._deadline_s = self._prompts.clock() + self._prompts.timeout_s
        self._prompts.watch(self)
        leader = self._prompts.leader
        if leader is not None:
            leader.want(
                self.name,
                self._transfer_id,
                self._prefill_address,
                self._token_ids,
                start_token=start_token,
                needs_note=True,
                tables=tables,
            )

    def _give_up(self) -> None:
        if self._has_pages and self._prompts.leader is not None:
            self._prompts.leader.cancel(self.name, self.failure)

    def on_event(self, event: TransferEvent | Settled) -> None:
        if not isinstance(event, Settled):
            return
        was_given_up, failure = bool(self.failure), event.failure
        if not was_given_up and not failure:
            try:
                self._write_note(self._note_index, event.note)
            except TransferError as error:
                failure = str(error)
        self._end(failure)
        if event.failure and not was_given_up:
            self._on_failed(self._bootstrap)
