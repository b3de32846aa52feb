"""vLLM's KV connector for kvferry, loaded by vLLM itself:

    --kv-transfer-config '{"kv_connector": "KvferryConnector", "kv_role": "kv_producer",
                           "kv_connector_extra_config": {"tls": {"insecure": 1}}}'

vLLM makes one of these objects in its scheduler's process and one in each worker's. They pass vLLM's calls on to
`kvferry.engines.vllm_sides`, which needs no vLLM. docs/vllm.md describes how to run it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from kvferry.engines.connector import ConnectorEngine
from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from kvferry.engines.vllm_adapters import VllmAdapters
from kvferry.engines.vllm_compute import ComputeByApi
from kvferry.engines.vllm_facts import model_fields, read_facts
from kvferry.engines.vllm_layout import VllmLayout, describe
from kvferry.engines.vllm_settings import api_headers, check_version, settings_of_replica, sides_of, vllm_settings
from kvferry.engines.vllm_sides import SchedulerSide, StepMessage, WorkerSide
from kvferry.engines.vllm_windows import WindowBlocks

_DONE = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_REPETITION)


@dataclass
class KvferryMetadata(KVConnectorMetadata):
    """Scheduler's object -> workers' objects, with each step."""

    plan: StepMessage = field(default_factory=StepMessage)


class KvferryConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring.

    `SupportsHMA` lets vLLM keep its hybrid KV cache manager on. Layers with a sliding window then have block tables of their own.

    Raises:
        ConfigError: A setting is unknown or invalid, or this vLLM is outside the tested range.
        LayoutError: The model has layers whose KV cannot be moved; they are named.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self._kv_transfer_config
        config = vllm_settings(transfer.kv_connector_extra_config, device=_device_type())
        check_version(vllm.__version__, allow_untested=config.allow_untested_vllm)
        parallel = vllm_config.parallel_config
        self._config = settings_of_replica(config, parallel)
        self._sides = sides_of(transfer.kv_role)
        self._instance = f"vllm-{transfer.engine_id}"
        self._leader: ConnectorLeader | None = None
        self._rank: ConnectorRank | None = None
        self._scheduler: SchedulerSide
        self._worker: WorkerSide
        if role == KVConnectorRole.SCHEDULER:
            layout = self._described()
            compute = None
            if self._config.api_url is not None:
                compute = ComputeByApi(self._config.api_url, self._config.api_key, headers=api_headers(parallel))
            self._leader = ConnectorLeader(
                self._config,
                instance=self._instance,
                num_ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
                sides=self._sides,
                compute=compute,
            )
            self._leader.start()
            self._scheduler = SchedulerSide(
                self._leader,
                layout.tables_to_fill,
                sides=self._sides,
                engine_id=transfer.engine_id,
                recomputes=transfer.kv_load_failure_policy == "recompute",
                windows=WindowBlocks(layout.window_tables),
                state_block_tokens=layout.state_block_tokens,
                adapters=None if vllm_config.lora_config is None else VllmAdapters(),
            )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return False: in sleep mode, vLLM unmaps its KV cache, and transfers were not tested with that. Called by vLLM 0.33."""
        return False

    def _described(self) -> VllmLayout:
        return describe(read_facts(self._vllm_config, self._kv_cache_config), windows=self._config.window_layers)

    # Called in the scheduler's process

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.use_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.added(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: Any) -> KvferryMetadata:
        return KvferryMetadata(plan=self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.received(tuple(connector_output.finished_recving or ()))
        self._scheduler.sent(tuple(connector_output.finished_sending or ()))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, is_done=request.status in _DONE)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, is_done=request.status in _DONE)

    # Called by kvferry's scheduler, see vllm_scheduler.py

    def use_first_tokens(self) -> None:
        """Enable first tokens from the prefill side. The caller must then call `take_first_tokens` after each step."""
        self._scheduler.may_use_first_tokens = True

    def take_first_tokens(self, *, patience_s: float = 0.0) -> dict[str, int]:
        """Return the first tokens of requests whose KV arrived on all workers since the last call, by request id.

        The workers report the same requests later, in `finished_recving`.

        Args:
            patience_s: Longest wait for a request that lacks only its KV or only its token.
        """
        return self._scheduler.take_first_tokens(patience_s=patience_s)

    # Called in the workers' processes

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = self._described()
        model = self._vllm_config.model_config
        # With microbatches, a layer runs once per microbatch, so one call does not complete it.
        layer_ends = {} if self._vllm_config.parallel_config.use_ubatching else layout.layer_ends
        engine = ConnectorEngine(
            layout=layout.layout,
            shard=layout.shard,
            pool=layout.pool(kv_caches),
            model_fields=model_fields(self._vllm_config) | layout.row_formats,
            max_context_tokens=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
            reports_layers=bool(layer_ends),
            kv_scales=layout.kv_scales,
        )
        self._rank = ConnectorRank(
            self._config, instance=self._instance, rank=layout.shard.rank, sides=self._sides, engine=engine
        )
        record = _recorded_event if engine.pool.device.type == "cuda" else None
        self._worker = WorkerSide(
            self._rank,
            layout.page_tables,
            record=record,
            layer_ends=layer_ends,
            first_needed_pages=layout.first_needed_pages if layout.window_tables else None,
            tables_to_read=layout.tables_to_read if layout.state_block_tokens else None,
            clear_tail=partial(layout.clear_tail, engine.pool) if layout.state_block_tokens else None,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvferryMetadata)
        self._worker.preempt(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Prepare blocks. KV arrives between steps, and vLLM schedules its requests after all of it arrived."""
        self._worker.begin_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, see `start_load_kv`."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Send the KV of all layers up to this one, while later ones are computed. Not called in replays of full CUDA graphs."""
        self._worker.layer_computed(self._plan(), layer_name)

    def wait_for_save(self) -> None:
        self._worker.computed(self._plan())

    def _plan(self) -> StepMessage:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvferryMetadata)
        return metadata.plan

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker.results()
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        raise NotImplementedError("failures go with get_transfer_results; they would be lost here")

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return nothing: `failed_recving` reports failures by request, which also works for several groups of blocks."""
        return set()

    # Both

    def shutdown(self) -> None:
        for part in (self._leader, self._rank):
            if part is not None:
                part.close()


def _device_type() -> str:
    from vllm.platforms import current_platform

    return "cuda" if current_platform.is_cuda_alike() else "cpu"


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
