"""The scheduler's part of the vLLM connector: which requests are handed over, and what the workers have to know of them.

Nothing of vLLM is imported: requests and scheduler outputs are used by the attributes that vLLM 0.32 gives them, so that this can
be tested without it. Every method is called by vLLM's scheduler, on its thread, and returns at once.

A request of the prefill side carries ``kv_transfer_params`` with ``do_remote_decode`` and, from a router that knows it, a
``transfer_id``; its answer carries what a request of the decode side needs: ``do_remote_prefill``, ``transfer_id`` and
``remote_address``. Other keys, which proxies for other connectors send along, are left alone.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from kvferry.engines.connector import DECODE, PREFILL, Sides
from kvferry.engines.connector_leader import ConnectorLeader
from transfer.connector.bound_prompts import PromptState
from transfer.tracing import TRACEPARENT, parse_traceparent
from transfer.utf8 import is_utf8

MAX_TRANSFER_ID_CHARS: Final = 96
"""An attempt's id on the wire adds 17, and has 128 at most."""

log = structlog.get_logger(__name__)

Blocks = tuple[list[int], ...]
"""A request's blocks in each KV cache group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStep:
    """What one step does to a request that is handed over.

    Args:
        name: The prompt's; see `request_id_of`.
        blocks: New ones, in each KV cache group.
        is_fresh: They are all that it has: it was preempted since.
        num_computed: Tokens whose KV is in the cache after the step.
    """

    name: str
    blocks: Blocks
    is_fresh: bool
    num_computed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEnd:
    """The request is finished in the scheduler. `is_held`: its blocks stay until the workers say that it was sent."""

    name: str
    is_held: bool


@dataclass(slots=True, kw_only=True)
class StepMessage:
    """From the scheduler to every worker, with each step; pickled on its way."""

    steps: list[SourceStep] = field(default_factory=list)
    ends: list[SourceEnd] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)


def request_id_of(name: str) -> str:
    """The request of a prompt, whose name has a number as well, used once: vLLM's ids can come again, and a prompt that is wanted
    is asked for anew when its start changes."""
    return name.rpartition("|")[0]


def _params_of(request: Any) -> Mapping[str, Any]:
    """The request's kv_transfer_params. vLLM also accepts them from a client's `vllm_xargs`, where they can be text or a list."""
    params = request.kv_transfer_params
    if params is not None and not isinstance(params, dict):
        log.warning("kv_transfer_params_ignored", request_id=request.request_id, kind=type(params).__name__)
        params = request.kv_transfer_params = None
    return params or {}


def _traceparent_of(request: Any) -> str:
    """Return the client's traceparent; empty means none. vLLM keeps it for a request only while its own tracing is on."""
    headers = getattr(request, "trace_headers", None) or {}
    text = str(headers.get(TRACEPARENT, ""))
    return text if parse_traceparent(text) is not None else ""  # it becomes metadata of a call, which a wrong one would fail


def _set(request: Any, **params: bool) -> None:
    """In the request's kv_transfer_params, which it can share with others (`n` above 1)."""
    request.kv_transfer_params = {**_params_of(request), **params}


@dataclass(slots=True, kw_only=True)
class _Source:
    """A request whose KV another instance fetches."""

    name: str
    transfer_id: str
    num_prompt_tokens: int
    has_blocks: bool = False


@dataclass(slots=True, kw_only=True)
class _Wanted:
    """A request whose KV is fetched."""

    name: str
    start_token: int
    is_offered: bool = False  # vLLM was told how much comes, and is to give it blocks
    is_bound: bool = False


class SchedulerSide:
    """See the module's docstring.

    Args:
        leader: Of this instance, started.
        sides: What the instance does.
        page_tables: vLLM's block ids of a request, by KV cache group -> its page tables.
        engine_id: This vLLM's own name for itself, told to routers.
        recomputes: Whether vLLM computes a prompt whose KV did not come, rather than fail it (``kv_load_failure_policy``).
    """

    def __init__(
        self,
        leader: ConnectorLeader,
        page_tables: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]],
        *,
        sides: Sides,
        engine_id: str,
        recomputes: bool,
    ) -> None:
        self._leader = leader
        self._sides = sides
        self._page_tables = page_tables
        self._engine_id = engine_id
        self._recomputes = recomputes
        self._sources: dict[str, _Source] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._ends: list[SourceEnd] = []
        self._numbers = itertools.count(1)

    # Of requests that come

    def added(self, request: Any) -> None:
        """A request was given to the scheduler."""
        params = _params_of(request)
        if not params.get("do_remote_decode") or request.request_id in self._sources:
            return
        transfer_id = params.get("transfer_id") or secrets.token_hex(16)
        if reason := self._why_not_handed_over(request, params, transfer_id):
            _set(request, do_remote_decode=False)  # also not when what speaks against it has changed
            log.warning("request_not_handed_over", request_id=request.request_id, reason=reason)
            return
        name = self._name(request)
        self._sources[request.request_id] = _Source(
            name=name, transfer_id=transfer_id, num_prompt_tokens=len(request.prompt_token_ids)
        )
        self._leader.offer(name, transfer_id, request.prompt_token_ids)

    def _why_not_handed_over(self, request: Any, params: Mapping[str, Any], transfer_id: object) -> str:
        if PREFILL not in self._sides:
            return "do_remote_decode is true; this instance's kv_role is kv_consumer, so nobody can fetch from it"
        if params.get("do_remote_prefill"):
            return "do_remote_prefill and do_remote_decode are both true; one request can be only one side of a transfer"
        if request.prompt_token_ids is None:
            return "its prompt is embeddings, not tokens"
        if not isinstance(transfer_id, str) or not 1 <= len(transfer_id) <= MAX_TRANSFER_ID_CHARS or not is_utf8(transfer_id):
            return f"transfer_id is {transfer_id!r:.200}; it must have 1 to {MAX_TRANSFER_ID_CHARS} characters of UTF-8"
        return ""

    def _name(self, request: Any) -> str:
        return f"{request.request_id}|{next(self._numbers)}"

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens come from elsewhere beyond those that are here; None: ask again."""
        self._leader.check()
        self.added(request)  # a vLLM without the hook
        params = _params_of(request)
        if not params.get("do_remote_prefill"):
            return 0, False
        num_tokens = len(request.prompt_token_ids or ())
        if num_computed >= num_tokens:
            self._settle_locally(request)
            return 0, False
        if request.request_id not in self._wanted and (reason := self._why_not_fetched(request, params)):
            log.warning("prompt_not_fetched", request_id=request.request_id, reason=reason)
            self._settle_locally(request)
            return 0, False
        wanted = self._wanted.get(request.request_id)
        view = None if wanted is None else self._leader.view(wanted.name)
        if view is not None and view.state is PromptState.FAILED:  # prefill was told that it is not asked for again
            if not self._recomputes:
                return num_tokens - num_computed, True  # the workers say that it failed, and vLLM ends the request
            log.warning("prompt_recomputed", request_id=request.request_id, reason=view.failure)
            self._settle_locally(request)
            return 0, False
        if wanted is not None and view is not None and view.can_start_late and num_computed > wanted.start_token:
            wanted.start_token = num_computed  # the prefix cache now has more of the prompt
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

    def _why_not_fetched(self, request: Any, params: Mapping[str, Any]) -> str:
        """What makes the KV that can be fetched another than vLLM would compute, or use."""
        if DECODE not in self._sides:
            return "do_remote_prefill is true; this instance's kv_role is kv_producer, so it fetches nothing"
        if getattr(request, "skip_reading_prefix_cache", False):
            return "it is to be computed without any cache (prompt_logprobs, for example)"
        if not params.get("transfer_id") and (request.mm_features or request.prompt_embeds is not None):
            return "it has inputs besides its tokens (images, embeddings), which a prefill node is not sent"
        return ""

    def _ask(self, request: Any, start_token: int) -> None:
        before = self._wanted.get(request.request_id)
        if before is not None:
            self._leader.cancel(before.name, "its start in the prompt has changed", is_wanted_again=True)
        params = _params_of(request)
        wanted = _Wanted(name=self._name(request), start_token=start_token)
        self._wanted[request.request_id] = wanted
        self._leader.want(
            wanted.name,
            str(params.get("transfer_id") or ""),
            str(params.get("remote_address") or ""),
            request.prompt_token_ids,
            start_token=start_token,
            traceparent=_traceparent_of(request),
        )

    def _settle_locally(self, request: Any) -> None:
        """Nothing comes from elsewhere for this request any more."""
        self._give_up(request, "its prompt is computed here")
        _set(request, do_remote_prefill=False)

    def _give_up(self, request: Any, reason: str) -> None:
        """Of a request whose KV is elsewhere and was not fetched, or not yet; of others nothing."""
        wanted = self._wanted.pop(request.request_id, None)
        params = _params_of(request)
        if wanted is not None:
            self._leader.cancel(wanted.name, reason)
        elif params.get("do_remote_prefill") and DECODE in self._sides:
            self._leader.decline(str(params.get("transfer_id") or ""), str(params.get("remote_address") or ""), reason)

    def allocated(self, request: Any, blocks: Blocks, num_external_tokens: int) -> None:
        """The scheduler has given the request blocks; `num_external_tokens` of it come from elsewhere."""
        self._begin(request.request_id)
        wanted = self._wanted.get(request.request_id)
        if num_external_tokens > 0 and wanted is not None and not wanted.is_bound:
            wanted.is_bound = True
            self._leader.bind(wanted.name, self._page_tables(blocks), start_token=wanted.start_token)
            _set(request, do_remote_prefill=False)  # whatever comes of it, it is not asked for again

    # Of steps

    def plan(self, scheduled: Any) -> StepMessage:
        """What the workers have to know of a step; `scheduled` is vLLM's SchedulerOutput."""
        self._leader.check()
        plan = StepMessage(ends=self._ends)
        self._ends = []
        if not self._sources and not plan.ends:
            return plan
        for request_id in scheduled.preempted_req_ids or ():
            if (source := self._sources.get(request_id)) is not None:
                source.has_blocks = False
                plan.preempted.append(source.name)
                self._leader.pause(source.name)
        for new in scheduled.scheduled_new_reqs:
            self._add_step(plan, scheduled, new.req_id, new.block_ids, new.num_computed_tokens, is_fresh=True)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, num_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            self._add_step(plan, scheduled, name, blocks or (), num_computed, is_fresh=name in cached.resumed_req_ids)
        return plan

    def _add_step(
        self,
        plan: StepMessage,
        scheduled: Any,
        request_id: str,
        blocks: Sequence[list[int]],
        num_computed: int,
        *,
        is_fresh: bool,
    ) -> None:
        source = self._sources.get(request_id)
        if source is not None:
            self._begin(request_id)  # of one that was preempted and given blocks again before this step
            after = num_computed + scheduled.num_scheduled_tokens[request_id]
            step = SourceStep(
                name=source.name, blocks=tuple(blocks), is_fresh=is_fresh, num_computed=min(after, source.num_prompt_tokens)
            )
            plan.steps.append(step)

    def _begin(self, request_id: str) -> None:
        """The request has blocks."""
        source = self._sources.get(request_id)
        if source is not None and not source.has_blocks:
            source.has_blocks = True
            self._leader.begin(source.name)

    # Of ends

    def received(self, names: Sequence[str]) -> None:
        """The workers have said of these requests that their KV came, or that it will not."""
        for name in names:
            self._wanted.pop(name, None)

    def finished(self, request: Any, *, is_done: bool) -> tuple[bool, dict[str, Any] | None]:
        """The request is over.

        Args:
            is_done: It ended as it should, not by an abort or an error.

        Returns:
            Whether its blocks stay until the workers say that it was sent, and what its answer carries.
        """
        self._give_up(request, "the request was aborted")
        source = self._sources.pop(request.request_id, None)
        if source is None:
            return False, None
        self._ends.append(SourceEnd(name=source.name, is_held=source.has_blocks))
        is_computed = is_done and source.has_blocks and request.num_computed_tokens >= source.num_prompt_tokens
        if not is_computed:
            self._leader.withdraw(source.name, f"the prefill side's engine ended the request: {request.status}")
            return source.has_blocks, None
        first_token = next(iter(request.output_token_ids), None)
        self._leader.finish(source.name, first_token=first_token)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": source.transfer_id,
            "remote_address": self._leader.address,
            "remote_engine_id": self._engine_id,
        }
