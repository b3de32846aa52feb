"""What users of vLLM and SGLang look for, and where it is here. Data alone.

Their names are those of vLLM's NixlConnector (its ``docs/features/nixl_connector_usage.md`` and ``nixl/stats.py``) and of
SGLang's ``metrics_collector.py``; counters are written as Prometheus shows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterpart:
    """Args:
    theirs: A name, or several that have one answer.
    here: What to look at; empty where there is nothing.
    differs: Where the meaning is another one.
    """

    theirs: tuple[str, ...]
    here: str
    differs: str


def _same(theirs: str | tuple[str, ...], here: str, differs: str) -> Counterpart:
    return Counterpart(theirs=(theirs,) if isinstance(theirs, str) else theirs, here=here, differs=differs)


VLLM: Final = (
    _same(
        "vllm:nixl_xfer_time_seconds",
        'kvferry_stage_seconds{stage="exposed"} or {stage="total"}',
        "There a transfer begins when the prompt is computed. Here it begins with the first chunk: exposed is what comes after"
        " the last computed chunk and compares with theirs, total is longer and mostly hidden (kvferry_overlap_ratio). Per"
        " request and prefill rank.",
    ),
    _same(
        "vllm:nixl_post_time_seconds",
        'kvferry_stage_seconds{stage="gather"}',
        "There it is the time to hand descriptors to NIXL. Here there is one write per part of a chunk, and gathering is what it "
        "takes to have that one.",
    ),
    _same(
        "vllm:nixl_bytes_transferred",
        "kvferry_transferred_bytes_total",
        "Theirs is a histogram over transfers, this a counter. Per request: its rate over that of "
        'kvferry_stage_seconds_count{stage="total"}.',
    ),
    _same(
        "vllm:nixl_num_descriptors",
        "kvferry_writes_total, kvferry_writes_avoided_total",
        "One descriptor there is a block of a layer; the two added up here count each token, layer, K and V, which is what it "
        "comes to where the tensor-parallel degrees differ.",
    ),
    _same(
        "vllm:nixl_num_failed_transfers_total",
        'kvferry_aborts_total{reason=~"lost|data_loss"}',
        "Requests, not transfers. One that is tried on another prefill node counts in kvferry_retries_total alone.",
    ),
    _same(
        "vllm:nixl_num_failed_notifications_total",
        "",
        "An ack that is lost is repeated with the next heartbeat, and nothing hangs on a single one.",
    ),
    _same(
        "vllm:nixl_num_kv_expired_reqs_total",
        "kvferry_ring_quarantined_bytes",
        "Nothing is given back because time has passed, so nothing expires. What a writer may still write is kept, and shown.",
    ),
    _same(
        "vllm:nixl_num_notifications_after_expiry_total",
        "kvferry_dropped_messages_total",
        "Late messages are among those, by reason.",
    ),
    _same("vllm:time_to_first_token_seconds", "kvferry_time_to_first_token_seconds", "From the decode node's acceptance on."),
    _same(
        "vllm:inter_token_latency_seconds", "kvferry_time_per_output_token_seconds", "Between two tokens of a request, as there."
    ),
    _same(
        ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "kvferry_running_requests, kvferry_queued_requests",
        "The same; what they may grow to is in kvferry_max_running_requests and kvferry_max_queued_requests.",
    ),
    _same(
        "vllm:kv_cache_usage_perc",
        "kvferry_pool_pages",
        'Pages by group and state: 1 - free / all. state="reserved" is set aside and not yet filled.',
    ),
    _same(
        ("vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"),
        'kvferry_offload_copied_bytes_total{direction=~"load|save"}',
        "Between device and host memory; the store below it is in kvferry_store_bytes_total.",
    ),
)

SGLANG: Final = (
    _same(
        "sglang:kv_transfer_latency_ms",
        'kvferry_stage_seconds{stage="total"}',
        "Seconds. Per request and prefill rank, from the first gather to the last release, the decode side's scatter included.",
    ),
    _same(
        "sglang:kv_transfer_speed_gb_s",
        "kvferry_link_written_bytes_total, kvferry_link_busy_seconds_total",
        "The rate of the first over that of the second: bytes per second while the link is in use, of all requests together.",
    ),
    _same(
        "sglang:kv_transfer_total_mb",
        "kvferry_transferred_bytes_total",
        'Bytes. Per request: its rate over that of kvferry_stage_seconds_count{stage="total"}.',
    ),
    _same(
        "sglang:kv_transfer_bootstrap_ms",
        "",
        "Ranks attach once, before a request needs them. Whether they have: kvferry_sessions, kvferry_peers.",
    ),
    _same(
        "sglang:kv_transfer_alloc_ms",
        'kvferry_queue_seconds{role="decode"}, kvferry_stage_seconds{stage="credit_wait"}',
        "Seconds. The first is the wait for room in the pool, the second that for bytes of the ring.",
    ),
    _same(
        ("sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_decode_prealloc_queue_reqs"),
        "kvferry_queued_requests",
        "By role. A prompt waits on both tiers at once, and is computed only when decode has room.",
    ),
    _same(
        ("sglang:num_prefill_inflight_queue_reqs", "sglang:num_decode_transfer_queue_reqs"),
        "kvferry_running_requests, kvferry_ring_live_grants",
        "Requests that are computed, transferred or generated; what is on its way is in the ring's live grants.",
    ),
    _same(
        ("sglang:num_transfer_failed_reqs_total", "sglang:num_bootstrap_failed_reqs_total"),
        'kvferry_aborts_total{reason=~"lost|data_loss"}',
        "Requests whose rank, peer or link was lost, or whose bytes arrived broken twice.",
    ),
    _same("sglang:num_prefill_retries_total", "kvferry_retries_total", "Attempts on another prefill node, by the decode node."),
    _same(
        ("sglang:num_decode_deferred_kv_release_reqs", "sglang:decode_deferred_kv_release_total"),
        "kvferry_ring_quarantined_bytes, kvferry_ending_sessions",
        "There pages of the pool wait, for a time. Here only bytes of the ring do, until the writer is known to have stopped.",
    ),
    _same(
        ("sglang:hicache_backup_bytes_total", "sglang:load_back_bytes_total"),
        'kvferry_offload_copied_bytes_total{direction=~"save|load"}',
        "Between device and host memory.",
    ),
    _same(
        ("sglang:prefetched_tokens_total", "sglang:backuped_tokens_total"),
        'kvferry_offload_hit_tokens_total{tier="storage"}, kvferry_offload_backups_total',
        "Tokens that came from the store; pages, not tokens, that went there.",
    ),
)
