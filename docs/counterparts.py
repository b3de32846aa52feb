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
        "NIXL's time begins when the prompt is computed: compare exposed. total begins with the first chunk and is mostly "
        "hidden (kvferry_overlap_ratio). Per request and prefill rank.",
    ),
    _same(
        "vllm:nixl_post_time_seconds",
        'kvferry_stage_seconds{stage="gather"}',
        "NIXL: the time to submit descriptors. kvferry: one write per piece, and the time to gather it.",
    ),
    _same(
        "vllm:nixl_bytes_transferred",
        "kvferry_transferred_bytes_total",
        'A counter instead of a histogram. Per request: divide its rate by that of kvferry_stage_seconds_count{stage="total"}.',
    ),
    _same(
        "vllm:nixl_num_descriptors",
        "kvferry_writes_total, kvferry_writes_avoided_total",
        "NIXL: one descriptor per block and layer. The sum of both counters has one per token, layer, K and V, as for "
        "different tensor-parallel degrees.",
    ),
    _same(
        "vllm:nixl_num_failed_transfers_total",
        'kvferry_aborts_total{reason=~"lost|data_loss"}',
        "Requests, not transfers. Retries on another prefill node count only in kvferry_retries_total.",
    ),
    _same(
        "vllm:nixl_num_failed_notifications_total",
        "",
        "A lost ack is repeated with the next heartbeat, so there is no such failure.",
    ),
    _same(
        "vllm:nixl_num_kv_expired_reqs_total",
        "kvferry_ring_quarantined_bytes",
        "Nothing is released by time. Bytes that a writer can still write are in quarantine.",
    ),
    _same(
        "vllm:nixl_num_notifications_after_expiry_total",
        "kvferry_dropped_messages_total",
        "Includes late messages, by reason.",
    ),
    _same("vllm:time_to_first_token_seconds", "kvferry_time_to_first_token_seconds", "From the acceptance by the decode node."),
    _same("vllm:inter_token_latency_seconds", "kvferry_time_per_output_token_seconds", "Equal: between two tokens of a request."),
    _same(
        ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        "kvferry_running_requests, kvferry_queued_requests",
        "Equal. Limits: kvferry_max_running_requests and kvferry_max_queued_requests.",
    ),
    _same(
        "vllm:kv_cache_usage_perc",
        "kvferry_pool_pages",
        '1 - free / all, by group and state. state="reserved": not filled yet.',
    ),
    _same(
        ("vllm:kv_offload_load_bytes", "vllm:kv_offload_store_bytes"),
        'kvferry_offload_copied_bytes_total{direction=~"load|save"}',
        "Between device and host memory. For the store: kvferry_store_bytes_total.",
    ),
)

SGLANG: Final = (
    _same(
        "sglang:kv_transfer_latency_ms",
        'kvferry_stage_seconds{stage="total"}',
        "In seconds. Per request and prefill rank, from the first gather to the last release, including the scatter.",
    ),
    _same(
        "sglang:kv_transfer_speed_gb_s",
        "kvferry_link_written_bytes_total, kvferry_link_busy_seconds_total",
        "Divide the rates: bytes per second while the link is in use, of all requests together.",
    ),
    _same(
        "sglang:kv_transfer_total_mb",
        "kvferry_transferred_bytes_total",
        'In bytes. Per request: divide its rate by that of kvferry_stage_seconds_count{stage="total"}.',
    ),
    _same(
        "sglang:kv_transfer_bootstrap_ms",
        "",
        "Ranks attach once, before requests need them: see kvferry_sessions and kvferry_peers.",
    ),
    _same(
        "sglang:kv_transfer_alloc_ms",
        'kvferry_queue_seconds{role="decode"}, kvferry_stage_seconds{stage="credit_wait"}',
        "In seconds: the wait for room in the pool, and for bytes of the ring.",
    ),
    _same(
        ("sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_decode_prealloc_queue_reqs"),
        "kvferry_queued_requests",
        "By role. A prompt waits on both tiers, and is computed only when decode has room.",
    ),
    _same(
        ("sglang:num_prefill_inflight_queue_reqs", "sglang:num_decode_transfer_queue_reqs"),
        "kvferry_running_requests, kvferry_ring_live_grants",
        "Requests that are computed, transferred or generated. The ring's live grants show those in transfer.",
    ),
    _same(
        ("sglang:num_transfer_failed_reqs_total", "sglang:num_bootstrap_failed_reqs_total"),
        'kvferry_aborts_total{reason=~"lost|data_loss"}',
        "Requests that lost a rank, peer or link, or had a wrong digest twice.",
    ),
    _same("sglang:num_prefill_retries_total", "kvferry_retries_total", "Attempts on another prefill node, by the decode node."),
    _same(
        ("sglang:num_decode_deferred_kv_release_reqs", "sglang:decode_deferred_kv_release_total"),
        "kvferry_ring_quarantined_bytes, kvferry_ending_sessions",
        "SGLang: pages of the pool wait for a time. kvferry: only bytes of the ring wait, until the writer has stopped.",
    ),
    _same(
        ("sglang:hicache_backup_bytes_total", "sglang:load_back_bytes_total"),
        'kvferry_offload_copied_bytes_total{direction=~"save|load"}',
        "Between device and host memory.",
    ),
    _same(
        ("sglang:prefetched_tokens_total", "sglang:backuped_tokens_total"),
        'kvferry_offload_hit_tokens_total{tier="storage"}, kvferry_offload_backups_total',
        "Tokens loaded from the store; pages (not tokens) written to it.",
    ),
)
