"""The alerts. Every alert has its heading in docs/runbooks.md, and cases in tests/deploy/monitoring/alert_cases.py.

None of them fires on a cluster without load. Windows are long enough for a scrape each minute. ``job`` is the operator's; that of
the nodes must have "kvferry" in it (`KvferryTargetDown`).
"""

from __future__ import annotations

from typing import Final

from deploy.monitoring.rule_file import Alert, Group, Severity

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING

NODES: Final = Group(
    name="kvferry-nodes",
    alerts=(
        Alert(
            name="KvferryTargetDown",
            severity=CRITICAL,
            expr='up{job=~".*kvferry.*"} == 0',
            lasts="2m",
            summary="{{ $labels.instance }} does not answer scrapes.",
            description=(
                "Prometheus cannot read /metrics of {{ $labels.instance }} (job {{ $labels.job }}). The node is down, hangs, or "
                "cannot be reached. Its requests end; other nodes are not affected."
            ),
        ),
        Alert(
            name="KvferryTierMissing",
            severity=CRITICAL,
            expr='absent(kvferry_build_info{role="prefill"}) or absent(kvferry_build_info{role="decode"})',
            lasts="5m",
            summary="No {{ $labels.role }} node is scraped.",
            description=(
                "Prometheus has no series of a {{ $labels.role }} node: none runs, or none is among the targets. Requests need "
                "both tiers."
            ),
        ),
        Alert(
            name="KvferryNodeNotServing",
            severity=WARNING,
            expr='kvferry_node_state{state="ready"} == 0',
            lasts="15m",
            summary="{{ $labels.role }} node {{ $labels.instance }} has not been ready for 15 minutes.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} answers scrapes, but is starting or drained. It accepts no "
                "requests."
            ),
        ),
        Alert(
            name="KvferryNodeCrashLooping",
            severity=CRITICAL,
            # An hour: a slow load and a supervisor that backs off leave two starts in half of one.
            expr="changes(kvferry_start_time_seconds[1h]) >= 3",
            lasts="0m",
            summary="{{ $labels.role }} node {{ $labels.instance }} restarts repeatedly.",
            description=(
                "The process of the {{ $labels.role }} node {{ $labels.instance }} was restarted {{ $value }} times in an hour. "
                "Each restart loses its requests and its KV."
            ),
        ),
        Alert(
            name="KvferryRanksRestarted",
            severity=WARNING,
            expr="kvferry_rank_restarts - min_over_time(kvferry_rank_restarts[30m]) > 0",
            lasts="0m",
            summary="Ranks of {{ $labels.role }} node {{ $labels.instance }} were restarted.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} restarted its ranks {{ $value }} times in 30 minutes. Each "
                "time, its requests were lost or retried on another node."
            ),
        ),
        Alert(
            name="KvferryRanksCrashLooping",
            severity=CRITICAL,
            expr="kvferry_rank_restarts - min_over_time(kvferry_rank_restarts[30m]) >= 3",
            lasts="0m",
            summary="Ranks of {{ $labels.role }} node {{ $labels.instance }} crash repeatedly.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} restarted its ranks {{ $value }} times in 30 minutes. It "
                "exits after restart.max_restarts, and loses requests until then."
            ),
        ),
        Alert(
            name="KvferryEventLoopStalls",
            severity=WARNING,
            expr=(
                "increase(kvferry_loop_turn_seconds_count[10m]) - ignoring (le) "
                'increase(kvferry_loop_turn_seconds_bucket{le="0.25"}[10m]) > 5'
            ),
            lasts="0m",
            summary="The event loop of a process of {{ $labels.role }} node {{ $labels.instance }} stalls repeatedly.",
            description=(
                "The event loop of one process of the {{ $labels.role }} node {{ $labels.instance }} has had {{ $value | "
                "humanize }} turns above 0.25 s in 10 minutes. Heartbeats and transfers of the process wait during a turn. "
                "After 1.5 s its sessions are lost. The label rank names the rank; without it, the process is the leader."
            ),
        ),
        Alert(
            name="KvferryNoPeers",
            severity=CRITICAL,
            expr=(
                'kvferry_peers{role="decode", state="joined"} == 0 unless on (job, instance) '
                'kvferry_node_state{state="starting"} == 1'
            ),
            lasts="2m",
            summary="Decode node {{ $labels.instance }} has no prefill node.",
            description=(
                "No prefill node is joined to the decode node {{ $labels.instance }}. It is not ready, and new requests fail "
                "with UNAVAILABLE."
            ),
        ),
        Alert(
            name="KvferryPeersDown",
            severity=WARNING,
            expr=(
                'sum by (job, role, instance) (kvferry_peers{state=~"joining|lost"}) > 0 unless on (job, instance) '
                'kvferry_node_state{state="starting"} == 1'
            ),
            lasts="10m",
            summary="{{ $labels.role }} node {{ $labels.instance }} cannot join {{ $value }} of its peers.",
            description=(
                "{{ $value }} nodes of the other tier have not been joined to the {{ $labels.role }} node {{ $labels.instance }} "
                "for 10 minutes. The others carry their load."
            ),
        ),
        Alert(
            name="KvferryBreakerOpen",
            severity=WARNING,
            expr='sum by (job, role, instance) (kvferry_breakers{state!="closed"}) > 0',
            lasts="5m",
            summary="Decode node {{ $labels.instance }} avoids {{ $value }} prefill nodes.",
            description=(
                "On the decode node {{ $labels.instance }}, circuit breakers of {{ $value }} prefill nodes have been open for 5 "
                "minutes. These nodes are lost or fail requests, and get almost none."
            ),
        ),
        Alert(
            name="KvferryDiscoveryFails",
            severity=WARNING,
            # By age alone: where looks are rare few can fail, and one that hangs has not failed yet. 0: it does not look again.
            expr=(
                "(kvferry_discovery_age_seconds > 3 * kvferry_discovery_interval_seconds + 60 or "
                "kvferry_discovery_age_seconds < 0) and kvferry_discovery_interval_seconds > 0"
            ),
            lasts="5m",
            summary="Discovery of {{ $labels.role }} node {{ $labels.instance }} fails.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} last read its file, DNS name or etcd successfully {{ $value "
                "| humanizeDuration }} ago (-1s: never). It keeps the known nodes and finds no new ones."
            ),
        ),
        Alert(
            name="KvferryJoinFaults",
            severity=WARNING,
            expr="increase(kvferry_join_faults_total[15m]) > 0",
            lasts="0m",
            summary="A bug ended joins of decode node {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} joins of the decode node {{ $labels.instance }} ended in an unexpected error in 15 "
                "minutes. They are retried; the log has the traceback."
            ),
        ),
    ),
)

_RANK: Final = "job, role, instance, rank"
_PROBE_RATE: Final = "rate(kvferry_link_probe_seconds_total[5m])"
_BUSY_RATE: Final = "rate(kvferry_link_busy_seconds_total[5m])"
_SLOWEST: Final = f"min by ({_RANK}) (kvferry_slowest_link_ratio >= 0)"
_FASTEST: Final = f"max by ({_RANK}) (kvferry_fastest_link_ratio)"

TRANSFER: Final = Group(
    name="kvferry-transfer",
    alerts=(
        Alert(
            name="KvferryWatermarkStalled",
            severity=CRITICAL,
            expr="kvferry_ring_watermark_stalled_seconds > 60",
            lasts="1m",
            summary="The watermark of rank {{ $labels.rank }} of {{ $labels.instance }} does not move.",
            description=(
                "The oldest grant of rank {{ $labels.rank }} of the decode node {{ $labels.instance }} has been open for {{ "
                "$value | humanizeDuration }}. Writers that need its space in the ring wait."
            ),
        ),
        Alert(
            name="KvferryQuarantineStuck",
            severity=WARNING,
            expr="min_over_time(kvferry_ring_quarantined_bytes[10m]) / kvferry_ring_capacity_bytes > 0",
            lasts="5m",
            summary="Rank {{ $labels.rank }} of {{ $labels.instance }} keeps bytes of its ring in quarantine.",
            description=(
                "{{ $value | humanizePercentage }} of the ring of rank {{ $labels.rank }} of {{ $labels.instance }} has been in "
                "quarantine for 10 minutes. The writer of an ended transfer has neither confirmed its last write nor ended."
            ),
        ),
        Alert(
            name="KvferryQuarantineGrowing",
            severity=CRITICAL,
            expr=(
                "(kvferry_ring_quarantined_bytes / kvferry_ring_capacity_bytes > 0.25) or (kvferry_ring_quarantined_bytes / "
                "kvferry_ring_capacity_bytes > 0 and delta(kvferry_ring_quarantined_bytes[15m]) > 0 and "
                "min_over_time(kvferry_ring_quarantined_bytes[15m]) > 0)"
            ),
            lasts="5m",
            summary="Quarantine takes the ring of rank {{ $labels.rank }} of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanizePercentage }} of the ring of rank {{ $labels.rank }} of {{ $labels.instance }} is in "
                "quarantine, and it grows or is above a quarter. Without free space, the rank receives no KV."
            ),
        ),
        Alert(
            name="KvferryLinkSlow",
            severity=WARNING,
            # All of a rank, or one link that is far behind the rank's best, which a card that many links fill does not explain.
            # That one the rank finds itself: the counters of links to the same rank of several nodes are one series.
            expr=(
                f"((sum by ({_RANK}) ({_PROBE_RATE}) / max by ({_RANK}) ({_BUSY_RATE}) < 0.2) and "
                f"max by ({_RANK}) ({_BUSY_RATE}) > 0.2) or "
                f"({_SLOWEST} < 0.2 and {_SLOWEST} < {_FASTEST} / 3)"
            ),
            lasts="10m",
            summary="Links of rank {{ $labels.rank }} of {{ $labels.instance }} are far slower than their probes.",
            description=(
                "While busy, one or all links of rank {{ $labels.rank }} of the prefill node {{ $labels.instance }} write at {{ "
                "$value | humanizePercentage }} of the speed that was measured at attach. KV arrives later, and so do first "
                "tokens."
            ),
        ),
        Alert(
            name="KvferryTransportFellBack",
            severity=WARNING,
            expr="kvferry_links_fallen_back > 0",
            lasts="5m",
            summary="Links of rank {{ $labels.rank }} of {{ $labels.instance }} fell back to a slower transport.",
            description=(
                "{{ $value }} links of rank {{ $labels.rank }} of the decode node {{ $labels.instance }} use a slower transport "
                "than expected. Either two processes of one machine use the network, or two GPUs do not use the best transport "
                "of their link. transport_fell_back in the rank's log gives the reason."
            ),
        ),
        Alert(
            name="KvferryDigestErrors",
            severity=WARNING,
            expr="increase(kvferry_broken_chunks_total[15m]) > 0",
            lasts="0m",
            summary="KV arrived with a wrong digest on rank {{ $labels.rank }} of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} chunks arrived at rank {{ $labels.rank }} of {{ $labels.instance }} with a wrong digest "
                "in 15 minutes. Each is resent once; a second error fails the request."
            ),
        ),
        Alert(
            name="KvferryDigestErrorRateHigh",
            severity=CRITICAL,
            expr="rate(kvferry_broken_chunks_total[5m]) / rate(kvferry_chunks_total[5m]) > 0.01",
            lasts="2m",
            summary="Many chunks arrive with a wrong digest on rank {{ $labels.rank }} of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanizePercentage }} of the chunks that arrive at rank {{ $labels.rank }} of {{ $labels.instance "
                "}} have a wrong digest. Requests fail with DATA_LOSS."
            ),
        ),
    ),
)

# Of those that clients did not give up, which says nothing of the node.
_NOT_ABORTED: Final = 'sum by (job, role, instance) (rate(kvferry_requests_total{outcome!="aborted"}[5m]))'

REQUESTS: Final = Group(
    name="kvferry-requests",
    alerts=(
        Alert(
            name="KvferryQueueGrowing",
            severity=WARNING,
            # A node younger than ten minutes has only the second half; a side that an engine hosts, without a limit, the first.
            expr=(
                "(avg_over_time(kvferry_queued_requests[5m]) > 1.5 * avg_over_time(kvferry_queued_requests[5m] offset 10m) + 1 "
                "or avg_over_time(kvferry_queued_requests[5m]) > 0.5 * kvferry_max_queued_requests) "
                "and min_over_time(kvferry_queued_requests[5m]) > 0"
            ),
            lasts="5m",
            summary="The queue of {{ $labels.role }} node {{ $labels.instance }} grows.",
            description=(
                "{{ $value | humanize }} requests wait on the {{ $labels.role }} node {{ $labels.instance }}: 50 % more than 10 "
                "minutes ago, or more than half of limits.max_queued_requests, above which requests are refused."
            ),
        ),
        Alert(
            name="KvferryRequestsRefused",
            severity=WARNING,
            expr=(
                '(sum by (job, role, instance) (rate(kvferry_requests_total{outcome="refused"}[5m])) / '
                f"{_NOT_ABORTED} > 0.05) and "
                'sum by (job, role, instance) (increase(kvferry_requests_total{outcome="refused"}[15m])) > 2'
            ),
            lasts="5m",
            summary="{{ $labels.role }} node {{ $labels.instance }} refuses {{ $value | humanizePercentage }} of its requests.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} refuses {{ $value | humanizePercentage }} of its requests. "
                "It has no room, is not ready, or the requests exceed its limits."
            ),
        ),
        Alert(
            name="KvferryRequestsFailing",
            severity=CRITICAL,
            expr=(
                '(sum by (job, role, instance) (rate(kvferry_requests_total{outcome="failed"}[5m])) / '
                f"{_NOT_ABORTED} > 0.05) and "
                'sum by (job, role, instance) (increase(kvferry_requests_total{outcome="failed"}[15m])) > 2'
            ),
            lasts="5m",
            summary="{{ $value | humanizePercentage }} of the requests of {{ $labels.role }} node {{ $labels.instance }} fail.",
            description=(
                "{{ $value | humanizePercentage }} of the requests of the {{ $labels.role }} node {{ $labels.instance }} end in "
                "an error. Clients of a decode node see it; a prefill node's requests can be retried on another node."
            ),
        ),
    ),
)

SECURITY: Final = Group(
    name="kvferry-security",
    alerts=(
        Alert(
            name="KvferryCertificateExpiresSoon",
            severity=WARNING,
            expr="kvferry_certificate_expiry_timestamp_seconds - time() < 86400",
            lasts="10m",
            summary="The certificate of {{ $labels.role }} node {{ $labels.instance }} expires within a day.",
            description=(
                "The certificate of the {{ $labels.role }} node {{ $labels.instance }} is valid for {{ $value | humanizeDuration "
                "}}. After that, no new connection is possible."
            ),
        ),
        Alert(
            name="KvferryCertificateExpiresNow",
            severity=CRITICAL,
            expr="kvferry_certificate_expiry_timestamp_seconds - time() < 3600",
            lasts="0m",
            summary="The certificate of {{ $labels.role }} node {{ $labels.instance }} expires within the hour, or has expired.",
            description=(
                "The certificate of the {{ $labels.role }} node {{ $labels.instance }} is valid for {{ $value | humanizeDuration "
                "}}. After that, peers that restart cannot join, and clients cannot connect."
            ),
        ),
        Alert(
            name="KvferryCertificateStale",
            severity=WARNING,
            expr="kvferry_certificate_stale == 1",
            lasts="5m",
            summary="{{ $labels.role }} node {{ $labels.instance }} cannot use its new certificate files.",
            description=(
                "The certificate files of the {{ $labels.role }} node {{ $labels.instance }} changed, and the new content cannot "
                "be used. The node keeps the old certificate until it expires."
            ),
        ),
        Alert(
            name="KvferryUnknownConnections",
            severity=WARNING,
            expr="sum by (job, role, instance) (rate(kvferry_refused_connections_total[5m])) > 0",
            lasts="15m",
            summary="Unknown clients connect to control ports of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} connections a second to control ports of the {{ $labels.role }} node {{ "
                "$labels.instance }} had no key of an attached writer, for 15 minutes. They were refused."
            ),
        ),
    ),
)

MEMORY: Final = Group(
    name="kvferry-memory",
    alerts=(
        Alert(
            name="KvferryOutOfMemory",
            severity=CRITICAL,
            expr="increase(kvferry_out_of_memory_steps_total[15m]) > 0",
            lasts="0m",
            summary="{{ $labels.role }} node {{ $labels.instance }} runs out of memory.",
            description=(
                "{{ $value | humanize }} steps of the {{ $labels.role }} node {{ $labels.instance }} found no memory in 15 "
                "minutes. All requests of these steps failed. The log names the work, the bytes and the settings to lower."
            ),
        ),
        Alert(
            name="KvferryPoolFull",
            severity=WARNING,
            expr="min_over_time(kvferry_requests_waiting_for_pages[5m]) > 0",
            lasts="5m",
            summary="The KV pool of {{ $labels.role }} node {{ $labels.instance }} is full.",
            description=(
                "At least {{ $value | humanize }} requests at a time have waited for pages of the KV pool of the "
                "{{ $labels.role }} node {{ $labels.instance }} for 10 minutes. They are refused after limits.queue_timeout_s."
            ),
        ),
        Alert(
            name="KvferryHostMemoryFull",
            severity=WARNING,
            expr="increase(kvferry_offload_host_full_total[10m]) > 0",
            lasts="20m",
            summary="Host memory of {{ $labels.role }} node {{ $labels.instance }} is too small for its requests.",
            description=(
                "Requests of the {{ $labels.role }} node {{ $labels.instance }} find no room in host memory, "
                "{{ $value | humanize }} in the last 10 minutes. They wait, or their KV is not kept."
            ),
        ),
        Alert(
            name="KvferryMemoryAbovePlan",
            severity=WARNING,
            expr=(
                "(kvferry_memory_real_bytes / kvferry_memory_planned_bytes > 1.1) and "
                "(kvferry_memory_real_bytes - kvferry_memory_planned_bytes > 268435456)"
            ),
            lasts="10m",
            summary="Line {{ $labels.line }} of rank {{ $labels.rank }} of {{ $labels.instance }} takes more than planned.",
            description=(
                "Line {{ $labels.line }} of the memory plan takes {{ $value | humanizePercentage }} of its plan on rank {{ "
                "$labels.rank }} of the {{ $labels.role }} node {{ $labels.instance }}. The reserve is smaller by the difference."
            ),
        ),
        Alert(
            name="KvferryStoreCircuitOpen",
            severity=WARNING,
            expr='sum by (job, role, instance, direction) (kvferry_store_circuit{state!="closed"}) > 0',
            lasts="5m",
            summary="{{ $labels.role }} node {{ $labels.instance }} does not use its store ({{ $labels.direction }}).",
            description=(
                "{{ $value }} processes of the {{ $labels.role }} node {{ $labels.instance }} have not used the store for 5 "
                "minutes ({{ $labels.direction }}), because it fails or hangs. Requests continue and compute the missing KV."
            ),
        ),
    ),
)

ALERTS: Final[tuple[Group, ...]] = (NODES, TRANSFER, REQUESTS, SECURITY, MEMORY)
