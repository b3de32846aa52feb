"""A connector that adds kvferry's store below the host memory of vLLM's own KV offloading. vLLM loads it:

    --kv-transfer-config '{"kv_connector": "KvferryStoreConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"storage.directory": "/srv/kv", "offload.host_memory": "8GiB"}}'

vLLM decides which blocks are saved and loaded, and copies them to and from host memory. `StoreTier` is a secondary tier: it loads
blocks that host memory does not have, and saves blocks that were copied to host memory. It passes these calls on to
`kvferry.engines.vllm_store`. So prefixes, windows, aborts and preemptions follow vLLM's rules. docs/vllm.md describes how to
run the connector, docs/adr/0059 the reasons for this design.

It is based on interfaces of vLLM 0.32 that vLLM calls experimental: `OffloadingConnector`, `TieringOffloadingSpec` and
`SecondaryTierManager`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, ClassVar, Final

import structlog
import torch
import vllm
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
    OffloadingWorker,
    RequestOffloadingContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvferry.engines.vllm_adapters import VllmAdapters
from kvferry.engines.vllm_facts import VllmFacts, model_fields, read_facts
from kvferry.engines.vllm_host_copies import HostCopies, chunk_part_bytes
from kvferry.engines.vllm_layout import check
from kvferry.engines.vllm_settings import VllmStoreConfig, check_version, store_settings
from kvferry.engines.vllm_store import PageKeys, RankPages, VllmStore, fingerprint, rank_fields
from transfer.errors import ConfigError, LayoutError
from transfer.logs import configure_engine_logging
from transfer.metrics import BREAKER_STATES, STORE_METRICS, StoreMetrics

_NAME: Final = "KvferryStoreConnector"
_HASHES: Final = ("sha256", "sha256_cbor")
"""Hashes of vLLM that give a block the same name in every process, and that resist collisions."""

log = structlog.get_logger(__name__)


@dataclass
class StorePages(KVConnectorHandshakeMetadata):
    """Sent once from each worker to the scheduler."""

    pages: RankPages


class KvferryStoreConnector(OffloadingConnector):
    """See the module's docstring.

    Raises:
        ConfigError: A setting is unknown, invalid or missing, the store cannot be opened, or a setting or the version of vLLM is
            not supported.
        LayoutError: The model has layers whose KV cannot be stored; the message names them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        config = store_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        configure_engine_logging(config.log)
        check_version(vllm.__version__, allow_untested=config.allow_untested_vllm)
        _check_settings(vllm_config)
        facts = read_facts(vllm_config, kv_cache_config)
        check(facts, has_store=True)
        _check_draft_layers(facts)
        changed = _with_offloading(vllm_config, config, host_bytes=_host_bytes(config, vllm_config, kv_cache_config))
        super().__init__(changed, role, kv_cache_config)
        self._config = config
        self._caches: dict[str, torch.Tensor] = {}

    # In the scheduler's process

    def on_new_request(self, request: Any) -> None:
        if self._vllm_config.lora_config is not None:
            self._tier.use_adapter(request.request_id, request.lora_request)
        super().on_new_request(request)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Begin to use the store, now that all workers have described their pages.

        Raises:
            ConfigError: Another connector of a MultiConnector described itself instead.
            LayoutError: The workers do not agree on the size of a page.
        """
        ranks = []
        for _, found in sorted(metadata.items()):
            if not isinstance(found, StorePages):
                raise ConfigError(
                    f"vLLM passes on the {type(found).__name__} of another connector only; list {_NAME} first in MultiConnector"
                )
            ranks.append(found.pages)
        offloading = self._tier.offloading
        chunks = {
            "tokens_per_hash": offloading.cache.tokens_per_hash,
            "blocks_per_chunk": offloading.cache.blocks_per_chunk,
            "groups": [[group.tokens_per_block, list(group.layer_names)] for group in offloading.groups],
            "hash": self._vllm_config.cache_config.prefix_caching_hash_algo,
            "vllm": vllm.__version__.split(".")[:2],
            "max_model_len": _length_of_long_rope(self._vllm_config.model_config),
        }
        keys = PageKeys(fingerprint(ranks, model=model_fields(self._vllm_config), chunks=chunks), self._config.storage.salt)
        self._tier.start(keys, page_bytes=ranks[0].page_bytes)
        log.info(
            "store_ready",
            fingerprint=keys.fingerprint,
            page_bytes=ranks[0].page_bytes,
            is_portable=all(rank.is_portable for rank in ranks),
        )

    def reset_cache(self) -> bool | None:
        """Forget all blocks in host memory, and do not use stored pages any more.

        vLLM calls this method when its weights may change. From then on, this instance uses only pages that it saves itself.
        """
        is_reset: bool | None = super().reset_cache()
        self._tier.separate()
        return is_reset

    @property
    def _tier(self) -> StoreTier:
        tier: StoreTier
        (tier,) = self.scheduler.manager.secondary_tiers
        return tier

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **options: Any) -> Any:
        config = store_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        _unregister_metrics()
        return super().build_prom_metrics(_with_offloading(vllm_config, config, host_bytes=0), *args, **options)

    # In the workers' processes

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> StorePages:
        facts = read_facts(self._vllm_config, self._kv_cache_config)
        check(facts, has_store=True)  # quantisation of the caches is known now
        assert self.connector_worker is not None
        spec = self.connector_worker.spec
        _forget_name(spec.region)
        fields = rank_fields(facts, self._caches, is_portable=spec.is_portable)
        return StorePages(pages=RankPages(fields=fields, page_bytes=spec.page_bytes, is_portable=spec.is_portable))


if _NAME not in KVConnectorFactory._registry:  # MultiConnector finds the classes of statistics by the connector's name alone
    KVConnectorFactory.register_connector(_NAME, __name__, _NAME)


def _check_draft_layers(facts: VllmFacts) -> None:
    """Reject draft layers: the KV of a page's last token depends on the next token, which is not part of the page's key."""
    if draft := next((layer for layer in facts.layers if layer.is_draft), None):
        raise LayoutError(
            f"layer {draft.name} of group {draft.group} is a draft model's, and the store keeps none: leave out "
            "--speculative-config, or use a method without a draft model (ngram, suffix)"
        )


def _check_settings(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    backend, num_hosts = parallel.distributed_executor_backend, parallel.nnodes_within_dp
    if parallel.world_size > 1 and (backend != "mp" or num_hosts != 1):
        raise ConfigError(
            f"--distributed-executor-backend is {backend} and the workers are on {num_hosts} hosts; it must be mp on one host, "
            "because scheduler and workers share host memory"
        )
    role, hash_name = vllm_config.kv_transfer_config.kv_role, vllm_config.cache_config.prefix_caching_hash_algo
    if role != "kv_both":
        raise ConfigError(f"kv_role is {role}; it must be kv_both, because {_NAME} loads and saves")
    if hash_name not in _HASHES:
        raise ConfigError(f"--prefix-caching-hash-algo is {hash_name}; stored pages need one of {', '.join(_HASHES)}")


def _unregister_metrics() -> None:
    """Unregister the metrics of an earlier engine of this process. vLLM does so only for metrics with vllm in their name."""
    names = {spec.name for spec in STORE_METRICS}
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "") in names:
            REGISTRY.unregister(collector)


def _length_of_long_rope(model_config: Any) -> int | None:
    """Return the maximum length if position embeddings depend on it, else None: with LongRoPE, it determines vLLM's factors."""
    return model_config.max_model_len if "longrope" in str(model_config.hf_config.to_dict()) else None


def _host_bytes(config: VllmStoreConfig, vllm_config: Any, kv_cache_config: Any) -> int:
    """Return the host memory of all workers. With `host_ratio`, all workers have caches of the same size."""
    memory = config.offload.host_memory
    if memory is None:
        assert config.offload.host_ratio is not None
        memory = int(config.offload.host_ratio * kv_cache_config.kv_cache_tensors[0].size)
    return memory * int(vllm_config.parallel_config.world_size)


def _with_offloading(vllm_config: Any, config: VllmStoreConfig, *, host_bytes: int) -> Any:
    """Return vLLM's configuration, with kvferry's settings translated to those of vLLM's own offloading."""
    changed = copy.copy(vllm_config)
    changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    changed.kv_transfer_config.kv_connector_extra_config = {
        "spec_name": StoreOffloadingSpec.__name__,
        "spec_module_path": __name__,
        "cpu_bytes_to_use": host_bytes,
        "blocks_per_chunk": config.page_blocks,
        "offload_prompt_only": not config.save_generated,
        # Without pipeline stages, vLLM has a page layout that does not depend on the number of ranks.
        "canonical_layout": vllm_config.parallel_config.pipeline_parallel_size == 1,
        "secondary_tiers": [{"type": StoreTier.__name__, "module_path": __name__, "config": config}],
    }
    return changed


class StoreOffloadingSpec(TieringOffloadingSpec):
    """vLLM's offloading in tiers, also for attention on a CPU. On a worker, `get_worker` sets the attributes of pages.

    Raises:
        ConfigError: Host memory has no room for a page.
    """

    _worker: OffloadingWorker | None

    region: SharedOffloadRegion | None = None
    page_bytes = 0
    is_portable = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if not self.num_chunks:
            raise ConfigError(
                f"offload.host_memory or offload.host_ratio is {self.extra_config['cpu_bytes_to_use']} bytes for all workers; "
                f"it must have room for the pages of some prompts, of {self.kv_bytes_per_chunk} bytes each"
            )

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        groups, tensors = kv_caches.group_data_refs, [one.tensor for one in kv_caches.tensors]
        is_canonical = self.config.canonical_layout
        if current_platform.is_cpu():
            if not self._worker:
                if is_canonical:
                    self._validate_canonical_refs(kv_caches)
                self._worker = self._host_worker(tensors, groups)
            worker = self._worker
            self.region = worker.region
        else:
            worker = super().get_worker(kv_caches)
            self.region = worker._mmap_region
        part_bytes = sum(chunk_part_bytes(tensors, groups, is_canonical=is_canonical)) * self.blocks_per_chunk
        copies = 1 if is_canonical or self.replicated_layout else self.config.parallel.world_size
        self.page_bytes = part_bytes * copies
        self.is_portable = is_canonical and bool(self.all_layers_portable)
        return worker

    def _host_worker(self, tensors: Sequence[torch.Tensor], groups: Sequence[Sequence[Any]]) -> HostWorker:
        is_canonical = self.config.canonical_layout
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            view = region.create_next_canonical_view if is_canonical else region.create_next_worker_view
            sizes = chunk_part_bytes(tensors, groups, is_canonical=is_canonical)
            chunks = [view(size * self.blocks_per_chunk) for size in sizes]
            if not is_canonical:
                groups = [[dataclasses.replace(layer, mapping=None) for layer in group] for group in groups]
            return HostWorker(region, HostCopies(tensors, groups, chunks, blocks_per_chunk=self.blocks_per_chunk))
        except BaseException:
            region.cleanup()
            raise


class HostWorker(OffloadingWorker):
    """The copies of a worker whose KV cache is in host memory. A copy is finished when its submit call returns."""

    def __init__(self, region: SharedOffloadRegion, copies: HostCopies) -> None:
        self.region = region
        self._copies: HostCopies | None = copies
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        assert self._copies is not None
        begun_s = time.perf_counter()
        return self._finished(job_id, begun_s, self._copies.save(src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        assert self._copies is not None
        begun_s = time.perf_counter()
        return self._finished(job_id, begun_s, self._copies.load(src_spec, dst_spec))

    def _finished(self, job_id: int, begun_s: float, num_bytes: int) -> bool:
        seconds = time.perf_counter() - begun_s
        self._results.append(TransferResult(job_id=job_id, success=True, transfer_size=num_bytes, transfer_time=seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: all jobs are done."""

    def shutdown(self) -> None:
        self._copies = None
        self.region.cleanup()


def _forget_name(region: SharedOffloadRegion | None) -> None:
    """Unlink the file of host memory. The scheduler and all workers have mapped it before.

    vLLM unlinks the file only at an orderly end, so a killed server would leave this memory allocated.
    """
    if region is not None and region._creator:
        for path in glob(f"{region.mmap_path}*"):
            with contextlib.suppress(FileNotFoundError):
                Path(path).unlink()
        region._creator = False


@dataclass(frozen=True)
class PageNames:
    """Names of a request's pages in the store.

    vLLM's names contain the name and the path of a LoRA adapter, but not its revision. With an adapter, names here begin with a
    hash of name and revision.

    Args:
        prefix: The hash; empty without an adapter. None means that the revision is unknown, so no page is used.
    """

    prefix: bytes | None = b""

    def of(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        return () if self.prefix is None else tuple(self.prefix + key for key in keys)


class StoreTier(SecondaryTierManager):
    """kvferry's store as a tier below vLLM's host memory."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        config: VllmStoreConfig,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.offloading = offloading_spec.config
        self._stats = StoreStats()
        self._store = VllmStore(config.storage, memory=primary_kv_view, observer=self._stats)
        self._adapters = VllmAdapters()
        self._names: dict[str, PageNames] = {}  # by request, until vLLM has made its context
        self._prefixes: dict[int, int] = {}  # length of the prefix in the names of a job

    def start(self, keys: PageKeys, *, page_bytes: int) -> None:
        self._store.start(keys, page_bytes=page_bytes)

    def separate(self) -> None:
        self._store.separate()

    def use_adapter(self, request_id: str, lora_request: Any) -> None:
        """Record the LoRA adapter of a request whose context vLLM is about to make."""
        if problem := self._adapters.problem(lora_request):
            log.warning("store_not_used", request_id=request_id, reason=problem)
            self._names[request_id] = PageNames(prefix=None)
        elif lora_request is not None:
            salt = self._adapters.salt(lora_request)
            self._names[request_id] = PageNames(prefix=hashlib.sha256(salt.encode()).digest())

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        names = _names_of(req_context).of([key])
        if not names:
            return LookupResult.MISS
        position = req_context.get_offload_key_position(key) or 0
        is_stored = self._store.is_stored(names[0], req_context.req_id, position=position)
        return LookupResult.RETRY if is_stored is None else LookupResult.HIT if is_stored else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._begin(job_metadata, self._store.save)

    def submit_load(self, job_metadata: Any) -> None:
        self._begin(job_metadata, self._store.load)

    def _begin(self, job: Any, begin: Callable[[int, Sequence[bytes], Sequence[int]], None]) -> None:
        naming = _names_of(job.req_context)
        names = naming.of(job.keys)
        self._prefixes[job.job_id] = len(naming.prefix or b"")
        begin(job.job_id, names, job.chunk_ids[: len(names)])

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            JobResult(
                job_id=job.job_id,
                success=job.is_whole,
                successful_keys=None if job.is_whole else [name[prefix:] for name in job.names],
                transfer_time=job.seconds,
                transfer_bytes=job.num_bytes,
            )
            for job in self._store.finished()
            for prefix in [self._prefixes.pop(job.job_id)]
        ]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        if (names := self._names.pop(req_context.req_id, None)) is not None:
            req_context.set_state(names)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._store.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._store.ask()

    def drain_jobs(self) -> None:
        self._store.drain()

    def shutdown(self) -> None:
        self._store.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
        return {
            spec.name: OffloadingHistogramMetadata(documentation=spec.help, labelnames=spec.labels, buckets=spec.buckets)
            if spec.kind == "histogram"
            else kinds[spec.kind](documentation=spec.help, labelnames=spec.labels)
            for spec in STORE_METRICS
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.take()


def _names_of(req_context: Any) -> PageNames:
    return req_context.get_state(PageNames) or PageNames()


class StoreStats(StoreMetrics):
    """Metrics of the store as vLLM's statistics. Counted on kvferry's loop, taken on the scheduler's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = OffloadingConnectorStats()

    def take(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call."""
        with self._lock:
            stats, self._stats = self._stats, OffloadingConnectorStats()
        return None if stats.is_empty() else stats

    def operation_finished(self, op: str, outcomes: Sequence[str], *, num_bytes: int, seconds: float) -> None:
        with self._lock:
            for outcome in outcomes:
                self._stats.increase_counter("kvferry_store_operations", 1, (op, str(outcome)))
            self._stats.increase_counter("kvferry_store_bytes", num_bytes, (op,))
            self._stats.observe_histogram("kvferry_store_seconds", seconds, (op,))

    def queue_changed(self, num_pages: int) -> None:
        with self._lock:
            self._stats.set_gauge("kvferry_store_queue_depth", num_pages)

    def circuits_changed(self, *, read: str, write: str) -> None:
        with self._lock:
            for direction, state in (("read", read), ("write", write)):
                for name in BREAKER_STATES:
                    self._stats.set_gauge("kvferry_store_circuit", int(name == state), (direction, name))
