"""The vLLM connector's parts in vLLM's scheduler and in its workers.

The scheduler's part decides which requests are handed over, and sends a `StepMessage` to the workers with each step. The workers'
part reports computed KV to kvferry, and to vLLM the requests that were sent or received.

This file imports nothing of vLLM, so that it can be tested without it. It reads attributes that requests and scheduler outputs
have in vLLM 0.32. vLLM calls all methods on its own threads. They return at once, except `WorkerSide.preempt`.

A request of the prefill side has ``kv_transfer_params`` with ``do_remote_decode`` and, from a router that knows it, a
``transfer_id``. Its answer has the keys of a request of the decode side: ``do_remote_prefill``, ``transfer_id`` and
``remote_address``. A router that sent both servers the same sampling parameters adds ``use_first_token``: then the answer begins
with the token that the prefill side sampled. Other keys, which proxies for other connectors send, are ignored.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import structlog

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from kvferry.engines.vllm_adapters import VllmAdapters
from kvferry.engines.vllm_windows import WindowBlocks
from transfer.connector.bound_prompts import PromptState
from transfer.connector.incoming_rank import Settled
from transfer.connector.outgoing_rank import Free
from transfer.engine_types import DeviceEvent
from transfer.layer_groups import NO_PAGE
from transfer.tracing import TRACEPARENT, parse_traceparent
from transfer.utf8 import is_utf8

MAX_TRANSFER_ID_CHARS: Final = 96
"""The id of an attempt on the wire is 17 characters longer, and has at most 128."""

log = structlog.get_logger(__name__)

Blocks = tuple[list[int], ...]
"""A request's blocks in each KV cache group."""

PageTables = Callable[[Sequence[Sequence[int]]], Sequence[list[int]]]
"""Converts a request's blocks in each KV cache group to its page tables."""

TablesToFill = Callable[[Sequence[Sequence[int]], int], Sequence[Sequence[int]]]
"""As `PageTables`, for a prompt of so many tokens that is fetched; see `VllmLayout.tables_to_fill`."""

TablesToRead = Callable[[Sequence[list[int]], int], Sequence[list[int]]]
"""Returns a request's page tables, given the number of its computed tokens; see `VllmLayout.tables_to_read`."""

ClearTail = Callable[[Sequence[Sequence[int]], int], None]
"""Zeroes the last block behind a prompt's tokens, given their number; see `VllmLayout.clear_tail`."""

FirstNeededPages = Callable[[int], Sequence[int]]
"""Returns the first page that vLLM keeps in each page table, by the next token of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingStep:
    """One step of a request that is handed over.

    Args:
        name: Name of the prompt; see `request_id_of`.
        blocks: New blocks in each KV cache group.
        is_fresh: The request was preempted, and has no other blocks.
        first_token: First token that the step computes.
        num_computed: Tokens whose KV is in the cache after the step.
    """

    name: str
    blocks: Blocks
    is_fresh: bool
    first_token: int
    num_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingEnd:
    """The scheduler finished the request. If `is_held`, it keeps the blocks until the workers report that the prompt was sent."""

    name: str
    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomingTail:
    """A prompt that is fetched into blocks which another layer may have used.

    Args:
        blocks: Its blocks in each KV cache group.
        num_tokens: Tokens that arrive, or are in the blocks already.
    """

    blocks: Blocks
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class StepMessage:
    """Scheduler -> every worker, with each step; pickled."""

    steps: list[OutgoingStep] = field(default_factory=list)
    ends: list[OutgoingEnd] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    tails: list[IncomingTail] = field(default_factory=list)


def request_id_of(name: str) -> str:
    """Return the request id in a prompt's name.

    The name also has a unique number, because vLLM can use an id again, and requests a prompt again when its start changes.
    """
    return name.rpartition("|")[0]


def _params_of(request: Any) -> Mapping[str, Any]:
    """Return the request's kv_transfer_params. vLLM also accepts them from a client's `vllm_xargs`, as text or a list."""
    params = request.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        log.warning("kv_transfer_params_ignored", request_id=request.request_id, kind=type(params).__name__)
        params = request.kv_transfer_params = None
    return params or {}


def _traceparent_of(request: Any) -> str:
    """Return the client's traceparent; empty means none. vLLM keeps it for a request only while its own tracing is on."""
    headers = getattr(request, "trace_headers", None) or {}
    text = str(headers.get(TRACEPARENT, ""))
    return text if parse_traceparent(text) is not None else ""  # an invalid one would fail the call whose metadata it becomes


def _can_use_first_token(request: Any, params: Mapping[str, Any]) -> bool:
    """Return whether the answer can begin with the prefill side's first token.

    The prefill side sends no log probabilities. For structured output and resumable requests, vLLM updates its own state for each
    sampled token.
    """
    sampling = request.sampling_params
    return (
        params.get("use_first_token") is True
        and bool(params.get("transfer_id"))  # otherwise the prefill side computes the prompt by itself, and samples greedily
        and sampling is not None
        and sampling.num_logprobs is None
        and not request.use_structured_output
        and not request.resumable
    )


def _leaves_out_last_token(params: Mapping[str, Any]) -> bool:
    """Return whether the prompt of a model with recurrent states has the token that the decode side computes.

    A decode side that requests a prompt without a router asks for the tokens before it only.
    """
    return params.get("is_whole_prompt") is not True


def _why_state_stays(request: Any, params: Mapping[str, Any]) -> str:
    """Return why the request's recurrent states cannot be handed over; empty if they can."""
    if request.max_tokens != 1:
        return f"its max_tokens is {request.max_tokens}; it must be 1, because vLLM overwrites states as it generates"
    if len(request.prompt_token_ids) < 2 and _leaves_out_last_token(params):
        return "its prompt is one token; with recurrent states it must have two, because the decode side computes the last one"
    if request.prompt_embeds is not None:
        return (
            "its prompt has embeddings; with recurrent states the prefill side leaves out the last token, and needs tokens only"
        )
    if getattr(request, "skip_reading_prefix_cache", False):
        return "it is to be computed without any cache (prompt_logprobs, for example); the decode side computes its prompt"
    return ""


def _without_last_token(request: Any) -> None:
    """Shorten the prompt of a request by a token. Its block hashes stay, because vLLM uses only those of computed tokens."""
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


def _set(request: Any, **params: bool) -> None:
    """Change a copy of the request's kv_transfer_params, because several requests can share them (`n` above 1)."""
    request.kv_transfer_params = {**_params_of(request), **params}


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """A request whose KV another instance fetches."""

    name: str
    transfer_id: str
    num_prompt_tokens: int
    is_shortened: bool  # by its last token, so the engine's token is not the one after the prompt
    has_blocks: bool = False


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """A request whose KV is fetched."""

    name: str
    start_token: int
    uses_first_token: bool  # the answer begins with the prefill side's token
    is_offered: bool = False  # vLLM knows how many tokens come, and should allocate blocks
    is_bound: bool = False


def _requests_of(scheduled: Any) -> Iterator[tuple[str, Blocks, int, bool]]:
    """Yield each request of a step: its id, new blocks, computed tokens, and whether it has no other blocks."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.block_ids, new.num_computed_tokens, True
    cached = scheduled.scheduled_cached_reqs
    for request_id, blocks, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        yield request_id, blocks or (), num_computed, request_id in cached.resumed_req_ids


class SchedulerSide:
    """The scheduler's part.

    Args:
        leader: The leader of this instance, started.
        engine_id: vLLM's name of this engine, for routers.
        recomputes: Whether vLLM computes a prompt whose KV did not arrive, instead of failing it (``kv_load_failure_policy``).
        windows: Blocks of sliding windows. None means that vLLM keeps blocks for every token.
        state_block_tokens: Tokens of a block of recurrent states; 0 means that no layer has one. The decode side computes the
            prompt's last token, and a state would then have it twice. So the prefill side leaves that token out.
        adapters: LoRA adapters. None means that vLLM runs without them.
    """

    def __init__(
        self,
        leader: ConnectorLeader,
        tables_to_fill: TablesToFill,
        *,
        sides: Sides,
        engine_id: str,
        recomputes: bool,
        windows: WindowBlocks | None = None,
        state_block_tokens: int = 0,
        adapters: VllmAdapters | None = None,
    ) -> None:
        self._leader = leader
        self._sides = sides
        self._tables_to_fill = tables_to_fill
        self._windows = WindowBlocks() if windows is None else windows
        self._state_block_tokens = state_block_tokens
        self._adapters = adapters
        self._engine_id = engine_id
        self._recomputes = recomputes
        self._outgoing: dict[str, _Outgoing] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._ends: list[OutgoingEnd] = []
        self._tails: list[IncomingTail] = []
        self._numbers = itertools.count(1)
        self.may_use_first_tokens = False
        """Whether vLLM's scheduler calls `take_first_tokens` after each step."""

    def use_cache_manager(self, manager: Any) -> None:
        """Use vLLM's `KVCacheManager`; see `WindowBlocks.use`."""
        self._windows.use(manager)

    def added(self, request: Any) -> None:
        """Offer a new request of the scheduler, if another instance will fetch its prompt."""
        params = _params_of(request)
        if not params.get("do_remote_decode") or request.request_id in self._outgoing:
            return
        transfer_id = params.get("transfer_id") or secrets.token_hex(16)
        if reason := self._why_not_handed_over(request, params, transfer_id):
            _set(request, do_remote_decode=False)  # do not check it again
            log.warning("request_not_handed_over", request_id=request.request_id, reason=reason)
            return
        is_shortened = bool(self._state_block_tokens) and _leaves_out_last_token(params)
        if is_shortened:
            _without_last_token(request)
        name = self._name(request)
        self._outgoing[request.request_id] = _Outgoing(
            name=name,
            transfer_id=transfer_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            is_shortened=is_shortened,
        )
        salt = None if self._adapters is None else self._adapters.salt(request.lora_request)
        self._leader.offer(name, transfer_id, request.prompt_token_ids, cache_salt=salt)

    def _why_not_handed_over(self, request: Any, params: Mapping[str, Any], transfer_id: object) -> str:
        if PREFILL not in self._sides:
            return "do_remote_decode is true; this instance's kv_role is kv_consumer, so nobody can fetch from it"
        if params.get("do_remote_prefill"):
            return "do_remote_prefill and do_remote_decode are both true; one request can be only one side of a transfer"
        if request.prompt_token_ids is None:
            return "its prompt is embeddings, not tokens"
        if self._windows and request.max_tokens != 1:
            return f"its max_tokens is {request.max_tokens}; it must be 1, because vLLM frees blocks of windows as it generates"
        if self._state_block_tokens and (reason := _why_state_stays(request, params)):
            return reason
        if not isinstance(transfer_id, str) or not 1 <= len(transfer_id) <= MAX_TRANSFER_ID_CHARS or not is_utf8(transfer_id):
            return f"transfer_id is {transfer_id!r:.200}; it must have 1 to {MAX_TRANSFER_ID_CHARS} characters of UTF-8"
        return self._adapter_problem(request)

    def _adapter_problem(self, request: Any) -> str:
        return "" if self._adapters is None else self._adapters.problem(request.lora_request)

    def _name(self, request: Any) -> str:
        return f"{request.request_id}|{next(self._numbers)}"

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond `num_computed` will be fetched (None: not known yet), and whether they come later."""
        self._leader.check()
        self.added(request)  # a vLLM without the hook
        params = _params_of(request)
        if not params.get("do_remote_prefill"):
            return 0, False
        num_tokens = self._num_loaded(request)
        if num_computed >= num_tokens or (self._state_block_tokens and num_computed % self._state_block_tokens):
            # vLLM copies a state that it found inside a block at the next step, over one that is received before.
            self._settle_locally(request)
            return 0, False
        if request.request_id not in self._wanted and (reason := self._why_not_fetched(request, params)):
            log.warning("prompt_not_fetched", request_id=request.request_id, reason=reason)
            self._settle_locally(request)
            return 0, False
        wanted = self._wanted.get(request.request_id)
        view = None if wanted is None else self._leader.view(wanted.name)
        if view is not None and view.state is PromptState.FAILED:
            if not self._recomputes:
                return num_tokens - num_computed, True  # the workers report the failure, and vLLM ends the request
            log.warning("prompt_recomputed", request_id=request.request_id, reason=view.failure)
            self._settle_locally(request)
            return 0, False
        if wanted is not None and view is not None and view.can_start_late and num_computed > wanted.start_token:
            wanted.start_token = num_computed  # the prefix cache has more of the prompt now
        if wanted is None or (wanted.start_token != num_computed and not wanted.is_bound):
            self._ask(request, num_computed)
            return None, False
        if view is None or view.state is PromptState.WAITING:
            return None, False
        if wanted.is_offered and view.state is PromptState.READY:
            # vLLM had the chance to allocate blocks at the previous call, and did not.
            self._leader.report_page_shortage(wanted.name)
        wanted.is_offered = True
        return num_tokens - num_computed, True

    def _moved_tokens(self, request: Any) -> list[int]:
        """Return the tokens of the prompt that the prefill side computes."""
        tokens: list[int] = request.prompt_token_ids or []
        return tokens[:-1] if self._state_block_tokens else tokens

    def _num_loaded(self, request: Any) -> int:
        """Return the tokens of the prompt that vLLM loads; it computes the others."""
        num_tokens = len(self._moved_tokens(request))
        return num_tokens if self._state_block_tokens else self._windows.num_loaded(num_tokens)

    def _why_not_fetched(self, request: Any, params: Mapping[str, Any]) -> str:
        """Return why the KV that can be fetched differs from the KV that vLLM would compute or use; empty if it does not."""
        if DECODE not in self._sides:
            return "do_remote_prefill is true; this instance's kv_role is kv_producer, so it fetches nothing"
        if getattr(request, "skip_reading_prefix_cache", False):
            return "it is to be computed without any cache (prompt_logprobs, for example)"
        if not params.get("transfer_id") and (request.mm_features or request.prompt_embeds is not None):
            return "it has inputs besides its tokens (images, embeddings), which a prefill node is not sent"
        if not params.get("transfer_id") and self._adapters is not None and request.lora_request is not None:
            return "it has a LoRA adapter and no transfer_id; a prefill node computes prompts without an adapter"
        return self._adapter_problem(request)

    def _ask(self, request: Any, start_token: int) -> None:
        before = self._wanted.get(request.request_id)
        if before is not None:
            self._leader.cancel(before.name, "its start in the prompt has changed", is_wanted_again=True)
        params = _params_of(request)
        uses_first_token = (
            self.may_use_first_tokens
            and not self._state_block_tokens
            and _can_use_first_token(request, params)
            and not self._windows.loses_first_token(len(request.prompt_token_ids))
        )
        wanted = _Wanted(name=self._name(request), start_token=start_token, uses_first_token=uses_first_token)
        self._wanted[request.request_id] = wanted
        self._leader.want(
            wanted.name,
            str(params.get("transfer_id") or ""),
            str(params.get("remote_address") or ""),
            self._moved_tokens(request),
            start_token=start_token,
            needs_first_token=uses_first_token,
            traceparent=_traceparent_of(request),
            cache_salt="" if self._adapters is None else self._adapters.salt(request.lora_request),
        )

    def _settle_locally(self, request: Any) -> None:
        """Have vLLM compute the request's prompt."""
        self._give_up(request, "its prompt is computed here")
        _set(request, do_remote_prefill=False)

    def _give_up(self, request: Any, reason: str) -> None:
        """Stop fetching the request's prompt, or decline it if that has not begun. No-op if there is nothing to fetch."""
        wanted = self._wanted.pop(request.request_id, None)
        params = _params_of(request)
        if wanted is not None:
            self._leader.cancel(wanted.name, reason)
        elif params.get("do_remote_prefill") and DECODE in self._sides:
            self._leader.decline(str(params.get("transfer_id") or ""), str(params.get("remote_address") or ""), reason)

    def allocated(self, request: Any, blocks: Blocks, num_external_tokens: int) -> None:
        """Record the request's blocks. `num_external_tokens` of its tokens are to be fetched."""
        if (outgoing := self._outgoing.get(request.request_id)) is not None:
            self._begin(outgoing)
        wanted = self._wanted.get(request.request_id)
        if wanted is None or wanted.is_bound:
            return
        if num_external_tokens == 0:  # a hit inside a block, which `matched` does not get, reaches as far
            self._settle_locally(request)
        else:
            wanted.is_bound = True
            num_tokens = len(self._moved_tokens(request))
            self._windows.leave_uncached(request.request_id, num_tokens, wanted.start_token)
            if self._state_block_tokens:
                self._tails.append(IncomingTail(blocks=tuple(list(table) for table in blocks), num_tokens=num_tokens))
            self._leader.bind(wanted.name, self._tables_to_fill(blocks, num_tokens), start_token=wanted.start_token)
            _set(request, do_remote_prefill=False)  # it is requested once, even if it fails

    def plan(self, scheduled: Any) -> StepMessage:
        """Return the message of a step; `scheduled` is vLLM's SchedulerOutput."""
        self._leader.check()
        plan = StepMessage(ends=self._ends, tails=self._tails)
        self._ends, self._tails = [], []
        if not self._outgoing and not plan.ends:
            return plan
        for request_id in scheduled.preempted_req_ids or ():
            if (outgoing := self._outgoing.get(request_id)) is not None:
                outgoing.has_blocks = False
                self._windows.release(request_id)
                plan.preempted.append(outgoing.name)
                self._leader.pause(outgoing.name)
        for request_id, blocks, num_computed, is_fresh in _requests_of(scheduled):
            if (outgoing := self._outgoing.get(request_id)) is not None:
                self._begin(outgoing)  # after a preemption, vLLM allocates blocks without a call of `allocated`
                end = min(num_computed + scheduled.num_scheduled_tokens[request_id], outgoing.num_prompt_tokens)
                step = OutgoingStep(
                    name=outgoing.name, blocks=tuple(blocks), is_fresh=is_fresh, first_token=num_computed, num_computed=end
                )
                plan.steps.append(step)
                if end == outgoing.num_prompt_tokens:
                    self._windows.keep(request_id, end)
        return plan

    def _begin(self, outgoing: _Outgoing) -> None:
        """Record that the request has blocks."""
        if not outgoing.has_blocks:
            outgoing.has_blocks = True
            self._leader.begin(outgoing.name)

    def received(self, request_ids: Sequence[str]) -> None:
        """Remove requests whose KV arrived or failed on all workers."""
        for request_id in request_ids:
            self._wanted.pop(request_id, None)

    def sent(self, request_ids: Sequence[str]) -> None:
        """Release blocks of requests whose prompt no worker reads any more."""
        for request_id in request_ids:
            self._windows.release(request_id)

    def take_first_tokens(self, *, patience_s: float = 0.0) -> dict[str, int]:
        """Return the first tokens of requests whose KV arrived since the last call, by request id. Call before `received`."""
        tokens: dict[str, int] = {}
        for name, token in self._leader.take_first_tokens(patience_s=patience_s).items():
            wanted = self._wanted.get(request_id_of(name))
            if wanted is not None and wanted.name == name:
                tokens[request_id_of(name)] = token
        return tokens

    def finished(self, request: Any, *, is_done: bool) -> tuple[bool, dict[str, Any] | None]:
        """End a request.

        Args:
            is_done: The request ended without an abort or an error.

        Returns:
            Whether vLLM keeps the blocks until the workers report that the prompt was sent, and the answer's parameters.
        """
        self._give_up(request, "the request was aborted")
        outgoing = self._outgoing.pop(request.request_id, None)
        if outgoing is None:
            return False, None
        self._ends.append(OutgoingEnd(name=outgoing.name, is_held=outgoing.has_blocks))
        if not outgoing.has_blocks:
            self._windows.release(request.request_id)
        is_computed = is_done and outgoing.has_blocks and request.num_computed_tokens >= outgoing.num_prompt_tokens
        if not is_computed:
            self._leader.withdraw(outgoing.name, f"the prefill side's engine ended the request: {request.status}")
            return outgoing.has_blocks, None
        first_token = None if outgoing.is_shortened else next(iter(request.output_token_ids), None)
        self._leader.finish(outgoing.name, first_token=first_token)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": outgoing.transfer_id,
            "remote_address": self._leader.address,
            "remote_engine_id": self._engine_id,
        }


@dataclass(slots=True, kw_only=True)
class Results:
    """Requests whose transfer ended since the last step, by vLLM's ids.

    Args:
        sent: Nothing reads their blocks any more.
        received: Their KV arrived or failed to arrive; nothing writes to their blocks.
        failed: Those of `received` whose KV failed to arrive.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerSide:
    """A worker's part.

    Args:
        record: Records an event after the work that the device has so far. None means that the device works synchronously.
        layer_ends: Number of layers of the layout up to and including each layer of the worker, by name. Empty means that the KV
            of all layers is reported after the step.
        first_needed_pages: See `FirstNeededPages`. None means that vLLM keeps all blocks.
        tables_to_read: See `TablesToRead`. None means that they are those of `page_tables`.
        clear_tail: See `ClearTail`. None means that blocks hold values of one element type only.
    """

    def __init__(
        self,
        rank: ConnectorRank,
        page_tables: PageTables,
        *,
        record: Callable[[], DeviceEvent] | None = None,
        layer_ends: Mapping[str, int] = MappingProxyType({}),
        first_needed_pages: FirstNeededPages | None = None,
        tables_to_read: TablesToRead | None = None,
        clear_tail: ClearTail | None = None,
    ) -> None:
        self._rank = rank
        self._clear_tail = clear_tail
        self._tables_to_read = tables_to_read
        self._first_needed_pages = first_needed_pages
        self._page_tables = page_tables
        self._record = record
        self._layer_ends = layer_ends
        self._last_layer = max(layer_ends, key=lambda layer: layer_ends[layer], default=None)
        self._sent_ends: tuple[StepMessage, int, frozenset[int]] | None = None  # a step, `num_ends_changes`, ends of its prompts
        self._begun: StepMessage | None = None  # step whose blocks are in `_tables`
        self._reported: StepMessage | None = None  # step whose last layer is reported
        self._tables: dict[str, list[list[int]]] = {}  # page tables of requests that are handed over
        self._held: set[str] = set()  # requests whose blocks the scheduler keeps until they are reported as sent

    def begin_loads(self, plan: StepMessage) -> None:
        """Prepare the blocks of prompts that are fetched from this step on. None of their tokens is touched."""
        if self._clear_tail is not None:
            for tail in plan.tails:
                self._clear_tail(tail.blocks, tail.num_tokens)

    def preempt(self, plan: StepMessage) -> None:
        """Stop reading the blocks of preempted requests, which the step is about to overwrite."""
        if plan.preempted:
            self._rank.pause(plan.preempted, "the prefill side's engine has preempted the request, and computes it again")

    def layer_computed(self, plan: StepMessage, layer: str) -> None:
        """Report the KV of a running step up to this layer. It is in the cache after the work that is queued on the device.

        Ignore layers that do not end a layer group of a prompt of the step.
        """
        end = self._layer_ends.get(layer)
        if end is None or not plan.steps or self._reported is plan:  # a draft model runs several times in a step
            return
        if layer == self._last_layer:
            self._report(plan)
            self._reported = plan
        elif end in self._ends_of(plan):
            self._report(plan, end_layer=end)

    def _ends_of(self, plan: StepMessage) -> frozenset[int]:
        """Return the ends of the layer groups of the step's prompts that are being sent. A transfer can start within a step."""
        num_changes = self._rank.num_ends_changes
        if self._sent_ends is None or self._sent_ends[0] is not plan or self._sent_ends[1] != num_changes:
            self._sent_ends = plan, num_changes, self._rank.layer_ends(step.name for step in plan.steps)
        return self._sent_ends[2]

    def computed(self, plan: StepMessage) -> None:
        """Report the KV of a step. It is in the cache after the work that is queued on the device."""
        if plan.steps and self._reported is not plan:
            self._report(plan)
        self._begun = self._reported = self._sent_ends = None
        for end in plan.ends:
            self._tables.pop(end.name, None)
            if end.is_held:
                self._held.add(end.name)
            self._rank.finish(end.name)

    def _report(self, plan: StepMessage, *, end_layer: int | None = None) -> None:
        if self._begun is not plan:
            self._begun = plan
            self._add_blocks(plan)
        event = self._record() if self._record is not None else None
        prompts = [(step.name, self._readable(step), step.num_computed) for step in plan.steps]
        self._rank.progress_all(prompts, event, end_layer=end_layer)

    def _readable(self, step: OutgoingStep) -> Sequence[list[int]]:
        tables = self._tables[step.name]
        return tables if self._tables_to_read is None else self._tables_to_read(tables, step.num_computed)

    def _add_blocks(self, plan: StepMessage) -> None:
        for step in plan.steps:
            new = self._page_tables(step.blocks) if step.blocks else ()
            tables = self._tables.get(step.name)
            if tables is None or step.is_fresh:
                tables = self._tables[step.name] = [[] for _ in new]
            elif self._first_needed_pages is not None:
                # vLLM may use the blocks again in the same table. The loop reads the lists, so passed entries get new ones.
                tables = self._tables[step.name] = [
                    table if not first or table[first - 1] == NO_PAGE else [NO_PAGE] * first + table[first:]
                    for table, first in zip(tables, self._first_needed_pages(step.first_token), strict=True)
                ]
            for table, pages in zip(tables, new, strict=False):
                table.extend(pages)

    def results(self) -> Results:
        """Return the requests whose transfer ended since the last call."""
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
