"""Serve a decode node's requests in its leader: admission, room, generation, and the results for each caller.

`transfer.connector.incoming` tracks their attempts: the prefill node, the call, and the KV that the ranks received.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import structlog

from decode_node.ngram import NgramDrafts
from decode_node.offload.tiers import PlaceRequest, Prompt, Tiers
from decode_node.progress import ProgressQueue
from decode_node.rank_messages import DecodeStepPart, ExpectRequest, FinishRequest, RunDecodeStep
from decode_node.text import TextCodec, TextStream
from node_runtime.engine_watch import StepWatch
from node_runtime.rank_messages import StepDone, StepFailed
from transfer.chunk import ChunkPlan
from transfer.config import DecodeLimitsConfig, SpeculativeConfig
from transfer.connector.attempt import Attempt, IncomingObserver, IncomingRoom, NotYet, WantedPrompt
from transfer.connector.incoming import IncomingTransfers
from transfer.connector.prefill_nodes import REASON_GRACE_S, PrefillNodes
from transfer.connector.side_service import RequestView
from transfer.engine_types import SamplingParams
from transfer.errors import EngineError, LocalProtocolError, OutOfMemory, ResourceExhausted, StoreFailed, TransferError
from transfer.instance import Instance
from transfer.layer_groups import DECODE_STEPS_IN_FLIGHT
from transfer.pb import kvferry_pb2 as pb
from transfer.tracing import Span
from transfer.transfer_ids import new_transfer_id

log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest(WantedPrompt):
    """One generation.

    Args:
        known: Lookup of its prompt in the tiers, by the current attempt.
        progress: Results for the caller. The last item is `GenerateDone` or an error.
        finish_reason: Empty until the last token.
        is_told: The last item is in `progress`, since `told_s` on the monotonic clock.
        drafts: Source of its draft tokens; None before it generates, and if they do not come from its own tokens.
    """

    max_new_tokens: int
    end_ids: frozenset[int]
    text: TextStream
    known: Prompt | None = None
    progress: ProgressQueue = field(default_factory=ProgressQueue)
    generated: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    last_token_s: float = 0.0
    finish_reason: str = ""
    is_told: bool = False
    told_s: float = 0.0
    drafts: NgramDrafts | None = None

    @property
    def next_position(self) -> int:
        """Position of the newest token, which is the input of the next step."""
        return len(self.token_ids) + len(self.generated) - 1

    def wanted(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the first of its next tokens, up to the end of the generation."""
        most = self.max_new_tokens - len(self.generated)
        end = next((place for place, token in enumerate(tokens, 1) if token in self.end_ids), most)
        return tokens[: min(end, most)]

    def view(self, now_s: float, *, num_ranks: int) -> RequestView:
        """See `WantedPrompt.view`."""
        view = WantedPrompt.view(self, now_s, num_ranks=num_ranks)
        return replace(view, generated_tokens=len(self.generated), max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationObserver:
    """Callbacks that report generated tokens to the leader's metrics.

    Args:
        on_first_token: Called with the seconds since acceptance.
        on_token: Called with the seconds since the token before. Tokens of one step share its seconds evenly.
        on_drafts: Called for each request of a step with its draft tokens, if it had any, and the number of those accepted.
    """

    on_first_token: Callable[[float], None]
    on_token: Callable[[float], None]
    on_drafts: Callable[[int, int], None] = lambda proposed, accepted: None


GenerationAttempt = Attempt[GenerationRequest]


class DecodeRequests:
    """Generate, and serve as the `IncomingScheduler` of a daemon. Owned by the leader's loop.

    With `can_overlap`, two steps are in flight: the next step is sent before the tokens of the running one are read. For requests
    of the running step, the next step contains no token, because the ranks have it on the device. A request that ends with the
    running step may also be in the next step. Its token of that step is dropped, and the ranks release its pages after that step.

    Args:
        tiers: Decide where the pages of each request lie.
        own: This instance.
        broadcast: Sends a message to every rank.
        on_broken: Called with the reason when the engine hangs. The life cannot be used any more.
        name_attempt: Makes the id of an attempt from the client's.
        can_overlap: Whether every rank accepts a step while the previous one runs.
    """

    reuses_pages: Final = False

    def __init__(
        self,
        *,
        tiers: Tiers,
        peers: PrefillNodes,
        text: TextCodec,
        own: Instance,
        limits: DecodeLimitsConfig,
        speculative: SpeculativeConfig,
        broadcast: Callable[[object], None],
        on_broken: Callable[[str], None],
        observer: IncomingObserver,
        generation: GenerationObserver,
        name_attempt: Callable[[str], str] = new_transfer_id,
        can_overlap: bool = False,
    ) -> None:
        self.transfers = IncomingTransfers[GenerationRequest](
            scheduler=self,
            peers=peers,
            own=own,
            retries=limits.prefill_retries,
            broadcast=broadcast,
            observer=observer,
            name_attempt=name_attempt,
        )
        self._tiers = tiers
        self._text = text
        self._limits = limits
        self._speculative = speculative
        self._watch = StepWatch(limits.step_timeout_s, on_broken)
        self._broadcast = broadcast
        self._observer = observer
        self._generation = generation
        tiers.listen(on_loaded=self._on_loaded, on_room=self._send_steps, on_lost=self.on_kv_lost)
        self._running: dict[str, GenerationAttempt] = {}
        self._max_steps = DECODE_STEPS_IN_FLIGHT if can_overlap else 1
        self._steps: deque[RunDecodeStep] = deque()  # in flight, the oldest first
        self._num_steps = 0
        self._is_engine_lost = False
        self._debt_s = 0.0  # time of the last step that read the store, less that of the steps since

    @property
    def num_generating(self) -> int:
        """Requests that get tokens: those that wait, or whose prompt is on its way, are not counted."""
        return len(self._running)

    async def close(self, error: TransferError) -> None:
        """End every request with `error`, without the ranks, which have ended or are about to."""
        for attempt in self._running.values():
            self._record_decode(attempt, str(error))
        self._running.clear()
        self._steps.clear()
        self._watch.close()
        await self.transfers.close(error)

    def submit(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        max_new_tokens: int,
        sampling: SamplingParams,
        end_ids: frozenset[int],
        cache_salt: str = "",
        span: Span | None = None,
        may_wait: bool = True,
    ) -> GenerationRequest:
        """Queue a generation.

        Args:
            request_id: The client's id. The id of each attempt begins with it.
            cache_salt: The request shares kept KV only with requests of the same salt.
            span: Span of a traced request. The caller ends it.
            may_wait: Whether it may wait for a prefill node to join.

        Raises:
            ResourceExhausted: The queue is full, or the pool can never hold prompt and new tokens.
            PeerUnreachable: No prefill node is joined, and it may not wait or none can come.
        """
        needed = len(token_ids) + max_new_tokens
        if (refusal := self._tiers.refusal(needed)) is not None:
            raise ResourceExhausted(f"prompt and new tokens ({needed}) {refusal}")
        most = self._limits.max_queued_requests
        if self.transfers.num_queued >= most:
            raise ResourceExhausted(f"decode queue is full ({most} requests wait; limits.max_queued_requests)")
        request = GenerationRequest(
            request_id=request_id,
            token_ids=token_ids,
            needs_first_token=True,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            end_ids=end_ids,
            accepted_s=time.monotonic(),
            queue_timeout_s=self._limits.queue_timeout_s,
            join_timeout_s=self._limits.join_timeout_s,
            text=self._text.stream(),
            cache_salt=cache_salt,
            span=span,
        )
        if span is not None:
            span.set(request_id=request_id, prompt_tokens=len(token_ids))
        self.transfers.fetch(request, may_wait=may_wait)
        return request

    # Implementation of `IncomingScheduler`

    def gives_early_room(self, attempt: GenerationAttempt) -> bool:
        """Return True, because this node allocates pages without waiting for a step of an engine."""
        return True

    async def prepare(self, attempt: GenerationAttempt) -> None:
        """Look the prompt up for each attempt, because KV from a node of another precision has other hashes."""
        request = attempt.prompt
        assert attempt.prefill is not None, "the attempt has a node"
        request.known = None
        request.known = await self._tiers.look_up(
            request.token_ids, request.cache_salt, prefill=attempt.prefill, may_skip=attempt.can_start_late
        )

    async def room(self, attempt: GenerationAttempt, plan: ChunkPlan) -> IncomingRoom | NotYet:
        request = attempt.prompt
        assert request.known is not None, "the prefill node has the prompt only after it was looked up"
        place = self._tiers.place(
            PlaceRequest(
                request_id=attempt.transfer_id,
                prompt=request.known,
                max_new_tokens=request.max_new_tokens,
                chunk_tokens=plan.chunk_tokens,
                may_skip=attempt.can_start_late,
                accepted_s=request.accepted_s,
            )
        )
        if place is None:
            return NotYet()
        message = partial(
            ExpectRequest,
            pages=place.pages.by_group,
            host_pages=place.host_pages,
            num_stored=place.num_stored,
            sampling=request.sampling,
        )
        return IncomingRoom(start_token=place.start_token, message=message)

    def announced(self, attempt: GenerationAttempt) -> None:
        self._tiers.begin_loading(attempt.transfer_id)

    def is_loading(self, attempt: GenerationAttempt) -> bool:
        return self._tiers.is_loading(attempt.transfer_id)

    def _on_loaded(self, request_id: str) -> None:
        attempt = self.transfers.find(request_id)
        if attempt is not None:
            self.transfers.run_if_whole(attempt)

    def stopped(self, attempt: GenerationAttempt, error: TransferError) -> None:
        if self._running.pop(attempt.transfer_id, None) is not None:
            self._record_decode(attempt, str(error))
        self._tiers.give_up(attempt.transfer_id)

    def drained(self, attempt: GenerationAttempt) -> None:
        self._tiers.gone(attempt.transfer_id)

    def settled(self, prompt: GenerationRequest, failure: TransferError | None) -> None:
        """Start to generate, or report the failure to the caller."""
        if failure is None:
            self._run(prompt)
            return
        if isinstance(failure, EngineError) and not failure.spares_kv and prompt.known is not None:
            self._tiers.damaged(prompt.known)  # no other request may use the KV that may have caused the failure
        prompt.is_told, prompt.told_s = True, time.monotonic()
        prompt.progress.put_nowait(failure)
        if prompt.span is not None:
            prompt.span.set(generated_tokens=len(prompt.generated), retries=prompt.num_retries)
            prompt.span.end(str(failure))
        log.info("request_failed", request_id=prompt.current.transfer_id, reason=str(failure))

    def call_ended(self, attempt: GenerationAttempt) -> None:
        """Report the end of a request whose tokens came before the last acks, which carry the statistics."""
        if attempt.prompt.finish_reason and attempt.is_current:
            self._report_done(attempt)

    # Messages from the ranks

    def on_engine_lost(self) -> None:
        """Send no further step, and ignore the outcomes of those under way. The life is about to end."""
        self._is_engine_lost = True

    def on_step_done(self, message: StepDone) -> None:
        if self._is_engine_lost:
            return
        if not self._steps or message.step != self._steps[0].step:
            raise LocalProtocolError(f"step {message.step} is done, but it is not the oldest one under way")
        parts = self._steps.popleft().parts
        if any(self._reads_store(part) for part in parts):
            self._debt_s = message.compute_s
        else:
            self._debt_s -= message.compute_s
        new: dict[str, Sequence[int]] = {}
        for part in parts:
            request_id = part.request_id
            attempt = self._running.get(request_id)
            if attempt is not None and request_id in message.tokens:
                accepted = message.accepted.get(request_id, ())
                new[request_id] = attempt.prompt.wanted((*accepted, message.tokens[request_id]))
                if part.num_drafts:
                    self._generation.on_drafts(part.num_drafts, len(accepted))
            token_id = part.token_id
            if token_id is None and attempt is not None:
                token_id = attempt.prompt.generated[-1]
            # The KV of rejected draft tokens is not valid, and that of the newest token is not computed.
            for computed in () if token_id is None else (token_id, *new.get(request_id, ())[:-1]):
                self._tiers.computed(request_id, computed)
        self._watch.step_over(num_left=len(self._steps))
        for request_id, tokens in new.items():
            self._take_tokens(self._running[request_id], tokens)
        for request_id, reason in message.faults.items():
            attempt = self._running.get(request_id)
            if attempt is not None:
                self._on_fault(attempt, EngineError(reason))
        self._tiers.step_over()
        self._send_steps()

    def on_step_failed(self, message: StepFailed) -> None:
        if self._steps and message.step == self._steps[0].step:
            self._steps.popleft()
            self._watch.step_over(num_left=len(self._steps))
        for request_id in message.request_ids:
            attempt = self._running.get(request_id)
            if attempt is not None:
                reason = message.reason
                error = OutOfMemory(reason) if message.is_out_of_memory else EngineError(reason, spares_kv=True)
                self.transfers.give_up(attempt.prompt, error)
        self._send_steps()

    def _on_fault(self, attempt: GenerationAttempt, error: EngineError) -> None:
        """End a request that a step could not continue."""
        if not self._tiers.reads_store(attempt.transfer_id):
            self.transfers.give_up(attempt.prompt, error)
            return
        # Another rank may have failed to read its KV in the store, and may be about to report it.
        del self._running[attempt.transfer_id]
        self._record_decode(attempt, str(error))
        asyncio.get_running_loop().call_later(REASON_GRACE_S, self.transfers.give_up, attempt.prompt, error)

    def on_kv_lost(self, request_id: str, reason: str) -> None:
        """End a request whose KV in the store cannot be written or read. Ignore a request that is over."""
        attempt = self.transfers.find(request_id)
        if attempt is not None and attempt.is_current:
            self.transfers.give_up(attempt.prompt, StoreFailed(reason))

    # Generation

    def _run(self, request: GenerationRequest) -> None:
        attempt = request.current
        assert attempt.first_token is not None, "a whole prompt has its first token"
        self._tiers.begin(attempt.transfer_id)
        self._running[attempt.transfer_id] = attempt
        request.last_token_s = time.monotonic()
        request.ttft_s = request.last_token_s - request.accepted_s
        self._generation.on_first_token(request.ttft_s)
        settings = self._speculative
        if settings.method == "ngram":
            request.drafts = NgramDrafts(
                request.token_ids, min_tokens=settings.prompt_lookup_min, max_tokens=settings.prompt_lookup_max
            )
        self._take_tokens(attempt, (attempt.first_token,))
        self._send_steps()

    def _take_tokens(self, attempt: GenerationAttempt, tokens: Sequence[int]) -> None:
        """Return a request's next tokens, at least one, to its caller. Only the last one can end the generation."""
        request = attempt.prompt
        if request.generated:
            now_s = time.monotonic()
            for _ in tokens:
                self._generation.on_token((now_s - request.last_token_s) / len(tokens))
            request.last_token_s = now_s
        request.generated += tokens
        if request.drafts is not None:
            request.drafts.extend(tokens)
        text = "".join(request.text.add(token) for token in tokens)
        request.progress.put_nowait(pb.GeneratedTokens(token_ids=tokens, text=text))
        if tokens[-1] in request.end_ids:
            self._finish(attempt, "stop")
        elif len(request.generated) >= request.max_new_tokens:
            self._finish(attempt, "length")

    def _finish(self, attempt: GenerationAttempt, reason: str) -> None:
        del self._running[attempt.transfer_id]
        request = attempt.prompt
        request.finish_reason = reason
        self.transfers.finish(request)
        self._observer.on_outcome("done")
        self._tiers.finish(attempt.transfer_id)
        self._broadcast(FinishRequest(request_id=attempt.transfer_id))
        self._record_decode(attempt)
        if request.span is not None:
            request.span.set(finish_reason=reason, cached_tokens=attempt.start_token, retries=request.num_retries)
            request.span.set(generated_tokens=len(request.generated))
        if attempt.call is None or attempt.call.done():
            self._report_done(attempt)

    def _record_decode(self, attempt: GenerationAttempt, error: str = "") -> None:
        request = attempt.prompt
        if request.span is not None:
            begun_s = request.accepted_s + request.ttft_s
            request.span.record("kvferry.decode", begun_s=begun_s, ended_s=time.monotonic(), error=error)

    def _report_done(self, attempt: GenerationAttempt) -> None:
        request = attempt.prompt
        if request.is_told:
            return
        request.is_told, request.told_s = True, time.monotonic()
        request.progress.put_nowait(
            pb.GenerateDone(
                finish_reason=request.finish_reason,
                prompt_tokens=len(request.token_ids),
                generated_tokens=len(request.generated),
                stats=attempt.stats if attempt.stats is not None else pb.TransferStats(),
                ttft_s=request.ttft_s,
                prefill_node=attempt.peer.address if attempt.peer is not None else "",
                retries=request.num_retries,
                cached_tokens=attempt.start_token,
            )
        )
        self.transfers.forget(request)

    def _send_steps(self) -> None:
        """Send next steps until the maximum number is in flight, or no request can be in another step."""
        while not self._is_engine_lost and len(self._steps) < self._max_steps and (step := self._next_step()) is not None:
            self._steps.append(step)
            self._broadcast(step)
            self._watch.step_sent()

    def _next_step(self) -> RunDecodeStep | None:
        """Return a step of all requests that can be in it; None if there is no such request."""
        # At most one step is in flight here, so every request in it has exactly one unread token.
        in_flight = {part.request_id for step in self._steps for part in step.parts}
        parts = tuple(
            part
            for attempt in self._running.values()
            if (part := self._part(attempt, is_unread=attempt.transfer_id in in_flight)) is not None
        )
        if not parts:
            return None
        # A step that reads the store takes long. After it, the other requests get the same amount of time.
        others = tuple(part for part in parts if not self._reads_store(part))
        if others and self._debt_s > 0:
            parts = others
        self._num_steps += 1
        return RunDecodeStep(step=self._num_steps, parts=parts)

    def _reads_store(self, part: DecodeStepPart) -> bool:
        return part.request_id in self._running and self._tiers.reads_store(part.request_id)

    def _part(self, attempt: GenerationAttempt, *, is_unread: bool) -> DecodeStepPart | None:
        """Return a request's part of the next step; None if it has no pages for it, or gets its last token in the running step.

        The number of draft tokens is limited by the request's pages and by the tokens that it may still generate.

        Args:
            is_unread: Whether the step in flight chooses the newest token.
        """
        request, settings = attempt.prompt, self._speculative
        position = request.next_position + is_unread
        if len(request.generated) + is_unread >= request.max_new_tokens:
            return None
        if not self._tiers.may_step(attempt.transfer_id, position):
            return None
        if is_unread:
            return DecodeStepPart(request_id=attempt.transfer_id, token_id=None, position=position)
        most = 0
        if settings.is_on:
            most = min(settings.num_speculative_tokens, request.max_new_tokens - len(request.generated) - 1)
            most = self._tiers.draft_room(attempt.transfer_id, position, most)
        return DecodeStepPart(
            request_id=attempt.transfer_id,
            token_id=request.generated[-1],
            position=position,
            draft_token_ids=() if request.drafts is None else request.drafts.propose(most),
            num_draft_tokens=most if settings.method == "draft_model" else 0,
        )
