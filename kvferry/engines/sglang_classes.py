"""The four classes of a transfer backend of SGLang: manager, sender, receiver and bootstrap server.

They translate SGLang's calls for `kvferry.engines.sglang_transfers`. Only this file imports SGLang when it is loaded;
`kvferry.engines.sglang_backend` loads it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import structlog
import torch
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVTransferDestination,
    KVTransferMetric,
    StateType,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving, get_spec
from sglang.srt.utils.network import NetworkAddress

from kvferry.engines.connector import DECODE, PREFILL, ConnectorEngine, Sides
from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from kvferry.engines.model_identity import model_fields
from kvferry.engines.sglang_bootstrap import BootstrapServer, PrefillLookups, PrefillRank, register_dp_rank, register_rank
from kvferry.engines.sglang_layout import EngineCut, MorePages, Scales, SglangPool, StageLayers, read_pool
from kvferry.engines.sglang_settings import check_supported, sglang_settings
from kvferry.engines.sglang_transfers import IncomingPrompt, OutgoingPrompt, Poll, SchedulerPrompts, pack_note, unpack_note
from transfer.config import ConnectorConfig
from transfer.engine_types import DeviceEvent
from transfer.errors import ConfigError, TransferError
from transfer.layer_groups import GroupKind

MAX_TOKEN_ID: Final = 2**31
"""SGLang uses hash values as the tokens of images. kvferry only compares token ids."""

GROUPS_OF_STATES: Final = {StateType.SWA: GroupKind.WINDOW, StateType.MAMBA: GroupKind.STATE, StateType.DSA: GroupKind.FULL}
"""SGLang's pools beside that of full attention, which it calls states. The pages of sparse indexers are those of the KV."""

log = structlog.get_logger(__name__)

_queue: Any = None  # the scheduler's queue whose manager is being made


class KVTransferFailed(Exception):
    """The failure of a transfer, with the attributes that SGLang reads."""

    def __init__(self, room: int, failure: str) -> None:
        super().__init__(f"room {room}: {failure or 'it failed on another rank'}")
        self.failure_reason = failure
        self.is_from_another_rank = not failure


class KvferryManager(BaseKVManager):
    """The kvferry of one scheduler, and on the first rank the leader of its instance."""

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        queue = _queue
        if queue is None:
            raise ConfigError("kvferry's plug-in did not see the scheduler's queue; SGLANG_PLUGINS must not leave it out")
        self.kv_args = args
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        _check_supported(args, server_args, queue, is_prefill=is_prefill)
        pool = _read_pool(queue, kinds={GROUPS_OF_STATES[state] for state in args.state_types})
        self.is_on_gpu = pool.view.device.type == "cuda"
        meet_timeout_s = float(envs.SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT.get())
        config = sglang_settings(os.environ, device=pool.view.device.type, meet_timeout_s=meet_timeout_s)
        rank, self._leader = _start(config, pool, PREFILL if is_prefill else DECODE, server_args, queue.scheduler)
        self.prompts = SchedulerPrompts(
            rank=rank,
            leader=self._leader,
            groups=pool.view.groups,
            page_size=pool.view.page_size,
            timeout_s=meet_timeout_s if is_prefill else envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT.get(),
        )
        self.rows = MetadataRows(queue.metadata_buffers)
        self._scheduler = queue.scheduler
        self.is_dummy_cp_rank = False
        parallel = get_parallel()
        self.dp_rank = parallel.attn_dp_rank if parallel.dp_size == 1 else args.system_dp_rank or 0
        self.dp_size = parallel.attn_dp_size if parallel.dp_size == 1 else parallel.dp_size
        if is_prefill:
            host = get_serving().host
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            self._bootstrap_url = NetworkAddress(host, get_disagg().disaggregation_bootstrap_port).to_url()
            self._telling = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvferry-dp-rank")
            if parallel.pp_rank == 0:  # only the leader, on this stage, knows the other stages
                self.register_to_bootstrap()
        else:
            self.lookups = PrefillLookups()
            atexit.register(self.lookups.close)
            self.prefill_info_table = self.lookups.known  # by bootstrap address; SGLang reads it
            self._executor: ThreadPoolExecutor | None = None

    def register_to_bootstrap(self) -> None:
        """Register this rank at prefill's bootstrap server, once that is up."""
        parallel = get_parallel()
        rank = PrefillRank(
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            tp_rank=parallel.attn_tp_rank,
            tp_size=parallel.attn_tp_size,
            page_size=self.kv_args.page_size,
            kv_cache_dtype=self.kv_args.kv_cache_dtype_str,
            follows_room=parallel.load_balance_method == "follow_bootstrap_room",
            http_port=get_serving().port,
            address="" if self._leader is None else self._leader.address,
        )
        register_rank(self._bootstrap_url, rank)

    @property
    def computing_stream(self) -> torch.cuda.Stream | None:
        """Stream on which a stage may still compute the chunk that SGLang sends; None without pipeline stages."""
        found: torch.cuda.Stream | None = self._scheduler.forward_stream if get_parallel().pp_size > 1 else None
        return found

    def more_pages(self, state_indices: list[Any] | None) -> MorePages:
        """Return a prompt's pages in pools beside that of full attention, by the kind of layers."""
        if state_indices is None:
            return {}
        return {
            GROUPS_OF_STATES[state]: np.asarray(pages).reshape(-1).tolist()
            for state, pages in zip(self.kv_args.state_types, state_indices, strict=True)
        }

    def tell_dp_rank(self, room: int) -> None:
        """Register this replica of a request at the engine's bootstrap server, on another thread, one call at a time."""

        def tell() -> None:
            try:
                register_dp_rank(self._bootstrap_url, room=room, dp_rank=self.dp_rank)
            except TransferError as error:
                log.error("dp_rank_not_registered", room=room, reason=str(error))

        self._telling.submit(tell)

    # Called by decode's queue

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return whether the shards of the prefill engine are known. If not, start a query."""
        return self.lookups.is_known(bootstrap_addr)

    def _ensure_prefill_recompute_executor(self) -> ThreadPoolExecutor:
        """Return threads for SGLang's queries to bootstrap servers."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix="kvferry-bootstrap")
        return self._executor

    def submit_prefill_recompute(self, kv_receiver: KvferryReceiver, payload: dict[str, Any]) -> None:
        """Fail a retracted request: prefill does not compute it again, because its room has been used."""
        kv_receiver.prompt.fail("a retracted request cannot be sent back to prefill with kvferry")


class KvferrySender(BaseKVSender):
    """One prompt on one prefill scheduler."""

    def __init__(
        self, mgr: KvferryManager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.prompt = OutgoingPrompt(mgr.prompts, bootstrap_room, read_note=mgr.rows.read)
        self._early_send_wait_event: DeviceEvent | None = None  # SGLang sets it
        self._num_pages = 0
        parallel = get_parallel()
        is_free_to_choose = parallel.load_balance_method != "follow_bootstrap_room" and not req_has_disagg_prefill_dp_rank
        if mgr.dp_size > 1 and is_free_to_choose and parallel.attn_tp_rank == parallel.pp_rank == 0:
            mgr.tell_dp_rank(bootstrap_room)

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Start to compute the prompt, for which decode waits."""
        assert aux_index is not None
        self._num_pages = int(num_kv_indices)
        self.prompt.begin(int(num_kv_indices), aux_index)

    def pop_decode_prefix_len(self) -> int:
        return self.prompt.wait_until_wanted()

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None) -> None:
        """Send the next tokens, which are computed."""
        assert num_kv_tokens is not None
        event, self._early_send_wait_event = self._early_send_wait_event, None
        pages = np.asarray(kv_indices).tolist()
        if event is None and self.kv_mgr.is_on_gpu:
            is_last = self.prompt.num_pages_sent + len(pages) == self._num_pages  # SGLang has waited for its result
            event = torch.cuda.Event()
            event.record(None if is_last else self.kv_mgr.computing_stream)
        self.prompt.send(pages, num_kv_tokens, event, self.kv_mgr.more_pages(state_indices))

    def poll(self) -> int:
        return self.prompt.poll()

    def poll_pp_consensus(self) -> int:
        """Return the state on the first pipeline stage, which decides for all stages."""
        return self.poll()

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric(transfer_total_bytes=self.prompt.num_pages_sent * sum(self.kv_mgr.kv_args.kv_item_lens))

    def failure_exception(self) -> None:
        self.prompt.fail("it failed on another rank")
        raise KVTransferFailed(self.bootstrap_room, self.prompt.failure)

    def abort(self) -> None:
        self.prompt.fail()


class KvferryReceiver(BaseKVReceiver):
    """One prompt on one decode scheduler."""

    require_staging = False
    abort_notified = False  # SGLang frees the pages of a failed prompt at once: poll() reports it once nothing writes to them
    bootstrap_infos = ()
    supports_host_destination = False

    def __init__(self, mgr: KvferryManager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        assert bootstrap_room is not None
        self.kv_mgr = mgr
        self.bootstrap_room = bootstrap_room
        self.bootstrap_addr = bootstrap_addr
        self.prompt = IncomingPrompt(
            mgr.prompts,
            bootstrap_room,
            bootstrap=bootstrap_addr,
            write_note=mgr.rows.write,
            on_failed=mgr.lookups.forget,  # another life of the engine may be behind that address
        )

    @property
    def conclude_state(self) -> int | None:
        state = self.prompt.state
        return state if state in (Poll.FAILED, Poll.SUCCESS) else None

    def init(self, prefill_dp_rank: int) -> None:
        """Record which replica of the prefill engine has the prompt."""
        info = self.kv_mgr.prefill_info_table.get(self.bootstrap_addr)
        if info is None or not 0 <= prefill_dp_rank < info.dp_size:
            self.prompt.fail(f"prefill at {self.bootstrap_addr} is not known any more, or has no replica {prefill_dp_rank}")
            return
        self.prompt.meet(info.addresses[prefill_dp_rank])

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        destination: Any = KVTransferDestination.DEVICE,
    ) -> None:
        """Fetch the KV into the pages that SGLang allocated."""
        assert aux_index is not None and destination == KVTransferDestination.DEVICE
        more_pages = self.kv_mgr.more_pages(state_indices)
        self.prompt.bind(np.asarray(kv_indices).tolist(), aux_index, decode_prefix_len or 0, more_pages)

    def poll(self) -> int:
        return self.prompt.poll()

    def failure_exception(self) -> None:
        self.prompt.fail("it failed on another rank")
        raise KVTransferFailed(self.bootstrap_room, self.prompt.failure)

    def abort(self) -> None:
        self.prompt.fail()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Do nothing, because kvferry notifies prefill."""


class KvferryBootstrapServer(BootstrapServer, BaseKVBootstrapServer):
    """The server on prefill's bootstrap port."""


CLASSES: Final[dict[str, type]] = {
    "manager": KvferryManager,
    "sender": KvferrySender,
    "receiver": KvferryReceiver,
    "bootstrap_server": KvferryBootstrapServer,
}
"""The classes by the value of SGLang's KVClassType."""


# Hooks of a scheduler, see kvferry.engines.sglang_backend


def making_manager(original: Callable[..., Any], queue: Any) -> Any:
    global _queue
    _queue = queue
    try:
        return original(queue)
    finally:
        _queue = None


def is_making_manager() -> bool:
    return _queue is not None


def made_sender(original: Callable[..., bool], queue: Any, req: Any, *args: Any, **kwargs: Any) -> bool:
    is_made = original(queue, req, *args, **kwargs)
    if is_made and isinstance(req.disagg_kv_sender, KvferrySender):
        req.disagg_kv_sender.prompt.offer(tuple(req.origin_input_ids))
    return is_made


def made_receiver(original: Callable[..., Any], queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    decode_req = original(queue, req, *args, **kwargs)
    if isinstance(decode_req.kv_receiver, KvferryReceiver):
        decode_req.kv_receiver.prompt.take(tuple(req.origin_input_ids))
    return decode_req


class MetadataRows:
    """Rows of SGLang's metadata buffers (first token, log probabilities) as bytes.

    Raises:
        ConfigError: They are not in host memory.
    """

    def __init__(self, buffers: Any) -> None:
        device = buffers.output_ids.device
        if device.type != "cpu":
            raise ConfigError(f"SGLang's metadata buffers are on {device}; they must be in host memory")
        self._buffers = buffers  # keeps the memory
        self._begins, _, self._sizes = buffers.get_buf_infos()

    def read(self, index: int) -> bytes:
        rows = zip(self._begins, self._sizes, strict=True)
        return pack_note([ctypes.string_at(begin + index * size, size) for begin, size in rows])

    def write(self, index: int, note: bytes) -> None:
        for begin, size, row in zip(self._begins, self._sizes, unpack_note(note, self._sizes), strict=True):
            ctypes.memmove(begin + index * size, row, size)


def _check_supported(args: Any, server_args: Any, queue: Any, *, is_prefill: bool) -> None:
    """Raise ConfigError for a setting of SGLang that kvferry does not support yet."""
    parallel, disagg = get_parallel(), get_disagg()
    has_windows = StateType.SWA in args.state_types
    check_supported(
        {
            "pp_size on the decode side": 1 if is_prefill else parallel.pp_size,
            "nnodes": parallel.nnodes,
            "attn_cp_size": parallel.attn_cp_size,
            "dcp_size": parallel.attn_dcp_size,
            "enable_kv_cache_sharding": bool(parallel.enable_kv_cache_sharding),
            "enable_hisparse": bool(getattr(queue.scheduler, "enable_hisparse", False)),
            "enable_pd_role_switch": bool(server_args.enable_pd_role_switch),
            "disaggregation_decode_allocation_policy": disagg.disaggregation_decode_allocation_policy,
            "disaggregation_decode_enable_radix_cache with sliding windows": (
                not is_prefill and has_windows and bool(disagg.disaggregation_decode_enable_radix_cache)
            ),
        }
    )
    if others := ", ".join(state.value for state in args.state_types if state not in GROUPS_OF_STATES):
        known = ", ".join(state.value for state in GROUPS_OF_STATES)
        raise ConfigError(
            f"{type(queue.token_to_kv_pool).__name__} keeps {others} beside its KV, which cannot be moved yet ({known} can); use "
            "--disaggregation-transfer-backend mooncake or nixl"
        )


def _read_pool(queue: Any, kinds: set[GroupKind]) -> SglangPool:
    parallel, scheduler = get_parallel(), queue.scheduler
    model, draft = scheduler.model_config, _draft_runner(scheduler)
    cut = EngineCut(
        num_layers=model.num_hidden_layers,
        num_kv_heads=model.get_total_num_kv_heads(),
        window_kv_heads=model.get_swa_num_kv_heads(1),
        draft_kv_heads=0 if draft is None else draft.model_config.get_total_num_kv_heads(),
        tp_size=parallel.attn_tp_size,
        tp_rank=parallel.attn_tp_rank,
        pp_size=parallel.pp_size,
        pp_rank=parallel.pp_rank,
        dtype=str(model.dtype),
        window_tokens=scheduler.sliding_window_size or 0,
        scales=_scales(scheduler.tp_worker.model_runner, 0) | _scales(draft, model.num_hidden_layers),
    )

    def gather_stages(own: StageLayers) -> list[StageLayers]:
        found: list[StageLayers] = parallel.pp_group.all_gather_object(own) if parallel.pp_size > 1 else [own]
        return found

    return read_pool(
        queue.token_to_kv_pool, cut, draft_pool=queue.draft_token_to_kv_pool, kinds=kinds, gather_stages=gather_stages
    )


def _draft_runner(scheduler: Any) -> Any:
    """Return the runner of speculative decoding's draft model; None if there is none, or another stage has it."""
    worker = getattr(scheduler.draft_worker, "draft_worker", None)
    runners = getattr(worker, "draft_runners", ())
    return runners[0] if runners else getattr(worker, "model_runner", None)


def _scales(runner: Any, first_layer: int) -> dict[int, Scales]:
    """Return the scales of K and V of each attention layer of a model: a stored value times its scale is the computed value.

    A layer with latents has two modules. SGLang loads the scales of one of them.
    """
    found: dict[int, Scales] = {}
    for module in () if runner is None else runner.model.modules():
        if isinstance(module, RadixAttention):
            k, v = (getattr(module, f"{name}_scale_float", None) or 1.0 for name in "kv")
            layer = first_layer + module.layer_id
            if layer not in found or (k, v) != (1.0, 1.0):
                found[layer] = (k, v)
    return found


def _start(
    config: ConnectorConfig, pool: SglangPool, sides: Sides, server_args: Any, scheduler: Any
) -> tuple[ConnectorRank, ConnectorLeader | None]:
    """Start this rank's kvferry, and on the first rank the leader. The ranks of an instance call it together."""
    parallel, shard = get_parallel(), pool.view.shard
    changes = {
        "quantization": server_args.quantization,
        "json_model_override_args": server_args.json_model_override_args,
    }
    fields = model_fields(server_args.model_path, revision=server_args.revision, changes=changes)
    spec = get_spec()  # resolved, unlike server_args: the draft model of MTP is the model itself
    if spec.speculative_draft_model_path not in (None, server_args.model_path):
        draft = model_fields(
            spec.speculative_draft_model_path,
            revision=spec.speculative_draft_model_revision,
            changes={"quantization": spec.speculative_draft_model_quantization},
        )
        fields |= {f"draft.{name}": value for name, value in draft.items()}
    instance = f"sglang-{os.getpid()}-{secrets.token_hex(8)}"
    for group in (parallel.pp_group, parallel.attn_tp_group):  # from the first stage to all, then from each one's first rank
        instance = group.broadcast_object(instance, src=0)
    engine = ConnectorEngine(
        layout=pool.view.layout,
        shard=shard,
        pool=pool.view,
        model_fields=fields,
        max_context_tokens=scheduler.model_config.context_len,
        vocab_size=MAX_TOKEN_ID,
        step_tokens=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
        kv_scales=pool.kv_scales,
    )
    rank = ConnectorRank(config, instance=instance, rank=shard.rank, sides=sides, engine=engine)
    atexit.register(rank.close)
    if shard.rank:
        return rank, None
    leader = ConnectorLeader(config, instance=instance, num_ranks=shard.num_ranks, sides=sides)
    atexit.register(leader.close)
    leader.start()
    return rank, leader
