"""vLLM's scheduler with the first token from the prefill side. `kvferry.vllm_plugin` makes it the decode side's default.

The prefill side samples a token after the prompt, and the connector receives it with the KV. vLLM's own scheduler would compute
the prompt's last token again to sample it. This one sends the token to the client as soon as the KV is there, and continues with
the second one. Requests without KV from a prefill side are scheduled as by vLLM.

Based on the scheduler of vLLM 0.32, whose interface is not stable: a request whose KV is loaded waits until
`_update_from_kv_xfer_finished` gets its id in `finished_recving`. The next `schedule` computes its tokens from
`num_computed_tokens` on.
Only vLLM's model runner V2 reads tokens after the prompt of a new request.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Final

import structlog
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvferry.engines.vllm_connector import KvferryConnector
from kvferry.vllm_plugin import why_no_first_tokens
from transfer.errors import ConfigError

log = structlog.get_logger(__name__)

PATIENCE_S: Final = 0.003
"""Longest wait of an idle engine's step for the rest of a request. It also delays the first step of a new request."""


class FirstTokenScheduler(AsyncScheduler):
    """See the module's docstring.

    Raises:
        ConfigError: vLLM has several synchronous steps in flight, which an `AsyncScheduler` does not support.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.scheduler_config.async_scheduling and self.parallel_config.pipeline_parallel_size > 1:
            raise ConfigError(
                "asynchronous scheduling is off; with pipeline parallelism, FirstTokenScheduler needs it: enable it, or remove "
                "--scheduler-cls"
            )
        reason = self._unsupported_reason()
        if reason:
            log.warning("first_tokens_not_used", reason=reason)
        else:
            self.connector.use_first_tokens()
        self._uses_first_tokens: Final = not reason
        self._reported_early: set[str] = set()  # requests whose KV has arrived, until the workers report them

    def _unsupported_reason(self) -> str:
        """Return the reason for which the prefill side's tokens cannot be used; empty if they can."""
        if not isinstance(self.connector, KvferryConnector):
            return "the KV connector is not KvferryConnector (--kv-transfer-config)"
        if reason := why_no_first_tokens(self.vllm_config):
            return reason
        if self.return_sampling_mask or self.aux_output_connector is not None:
            return "sampling masks or routed experts are returned; the prefill side does not send those of the first token"
        return ""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        # An idle engine sleeps 1 ms between two steps. It must not sleep while a token arrives.
        # Data-parallel engines step together: one that waits would delay the others.
        patience_s = 0.0 if self.running or self.parallel_config.data_parallel_size > 1 else PATIENCE_S
        tokens = self.connector.take_first_tokens(patience_s=patience_s) if self._uses_first_tokens else {}
        waiting = {request_id: token for request_id, token in tokens.items() if self._is_waiting(request_id)}
        if waiting:
            # The workers report these requests, too, but with the results of a later step.
            super()._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving=set(waiting)))
            self._reported_early |= waiting.keys()
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, token in waiting.items():
            if self._is_waiting(request_id) and self._has_room(request := self.requests[request_id]):
                output = self._append_first_token(request, token)
                outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        return outputs

    def _is_waiting(self, request_id: str) -> bool:
        """Return whether the request waits for its KV. Otherwise it was aborted."""
        request = self.requests.get(request_id)
        return request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        reported = kv_connector_output.finished_recving
        if reported and self._reported_early:
            kv_connector_output = replace(kv_connector_output, finished_recving=reported - self._reported_early)
            self._reported_early -= reported
        super()._update_from_kv_xfer_finished(kv_connector_output)

    def _has_room(self, request: Request) -> bool:
        """Allocate the block of the first token's KV, a new one if the prompt fills its blocks. Return False if none is free.

        vLLM schedules requests whose KV was loaded before all others, and waits if it finds no block for one of them. If loaded
        prompts hold all blocks, it would wait for ever. Without the token, vLLM computes the prompt's last token again, in a
        block that the request has. Then the request runs, and can be preempted.
        """
        return self.kv_cache_manager.allocate_slots(request, 1) is not None

    def _append_first_token(self, request: Request, token: int) -> EngineCoreOutput:
        """Append the first token to a request whose KV has arrived, and finish the request if that token ends it."""
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        prefill_stats = request.take_prefill_stats()
        if prefill_stats is not None:
            prefill_stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
        waiting = request.status
        # Not AsyncScheduler's: no step of this request is in flight.
        _, is_stopped = Scheduler._update_request_with_output(self, request, [token])
        finish_reason, events = request.get_finished_reason(), request.take_events()
        if is_stopped:
            status, request.status = request.status, waiting
            self.finish_requests(request.request_id, status)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[token],
            finish_reason=finish_reason,
            stop_reason=request.stop_reason,
            events=events,
            prefill_stats=prefill_stats,
            trace_headers=request.trace_headers,
        )
