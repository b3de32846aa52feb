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
                "Prometheus cannot read /metrics of {{ $labels.instance }} (job {{ $labels.job }}): the node is down, hangs, or "
                "cannot be reached. Its requests have ended, or will; the other nodes go on."
            ),
        ),
        Alert(
            name="KvferryTierMissing",
            severity=CRITICAL,
            expr='absent(kvferry_build_info{role="prefill"}) or absent(kvferry_build_info{role="decode"})',
            lasts="5m",
            summary="No {{ $labels.role }} node is scraped.",
            description=(
                "Prometheus has no series of any {{ $labels.role }} node: none runs, or none is among the targets. Without one "
                "no request is served."
            ),
        ),
        Alert(
            name="KvferryNodeNotServing",
            severity=WARNING,
            expr='kvferry_node_state{state="ready"} == 0',
            lasts="15m",
            summary="{{ $labels.role }} node {{ $labels.instance }} has not been ready for 15 minutes.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} answers scrapes, but is starting or drained. It takes "
                "no requests."
            ),
        ),
        Alert(
            name="KvferryNodeKeepsStarting",
            severity=CRITICAL,
            # An hour: a slow load and a supervisor that backs off leave two starts in half of one.
            expr="changes(kvferry_start_time_seconds[1h]) >= 3",
            lasts="0m",
            summary="{{ $labels.role }} node {{ $labels.instance }} ends and is started again and again.",
            description=(
                "The process of the {{ $labels.role }} node {{ $labels.instance }} was started again {{ $value }} times in an "
                "hour. It serves nobody while it starts, and what it had is lost each time."
            ),
        ),
        Alert(
            name="KvferryRanksRestart",
            severity=WARNING,
            expr="kvferry_rank_restarts - min_over_time(kvferry_rank_restarts[30m]) > 0",
            lasts="0m",
            summary="Ranks of {{ $labels.role }} node {{ $labels.instance }} were started again.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} has started its ranks again {{ $value }} times in 30 "
                "minutes. Each time, its requests were lost, or were tried on another node."
            ),
        ),
        Alert(
            name="KvferryRanksCrashOften",
            severity=CRITICAL,
            expr="kvferry_rank_restarts - min_over_time(kvferry_rank_restarts[30m]) >= 3",
            lasts="0m",
            summary="Ranks of {{ $labels.role }} node {{ $labels.instance }} crash again and again.",
            description=(
                "The {{ $labels.role }} node {{ $labels.instance }} has started its ranks again {{ $value }} times in 30 "
                "minutes. It gives up after restart.max_restarts, and loses requests until then."
            ),
        ),
        Alert(
            name="KvferryLoopTurnsLong",
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
                "No prefill node is joined to the decode node {{ $labels.instance }}: it is not ready, and every new request to "
                "it fails with UNAVAILABLE."
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
            summary="Decode node {{ $labels.instance }} leaves {{ $value }} prefill nodes out.",
            description=(
                "The circuit breakers of {{ $value }} prefill nodes have not been closed for 5 minutes on the decode node {{ "
                "$labels.instance }}: those nodes are lost, or fail requests, and get next to none."
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
                "What the {{ $labels.role }} node {{ $labels.instance }} reads from the file, the name or etcd was last good {{ "
                "$value | humanizeDuration }} ago (-1s: never), though it looks more often. It goes on with the nodes that it "
                "knows, and hears of no new ones."
            ),
        ),
        Alert(
            name="KvferryJoinFaults",
            severity=WARNING,
            expr="increase(kvferry_join_faults_total[15m]) > 0",
            lasts="0m",
            summary="A bug ended joins of decode node {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} joins of the decode node {{ $labels.instance }} ended in an error that nobody expected, "
                "in 15 minutes. They are tried again; the log has the traceback."
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
            summary="The watermark of rank {{ $labels.rank }} of {{ $labels.instance }} stands still.",
            description=(
                "The oldest grant of rank {{ $labels.rank }} of the decode node {{ $labels.instance }} is open, and has been the "
                "oldest for {{ $value | humanizeDuration }}. Writers that wait for bytes of its ring wait for it."
            ),
        ),
        Alert(
            name="KvferryQuarantineStays",
            severity=WARNING,
            expr="min_over_time(kvferry_ring_quarantined_bytes[10m]) / kvferry_ring_capacity_bytes > 0",
            lasts="5m",
            summary="Rank {{ $labels.rank }} of {{ $labels.instance }} keeps bytes of its ring in quarantine.",
            description=(
                "{{ $value | humanizePercentage }} of the ring of rank {{ $labels.rank }} of {{ $labels.instance }} has been in "
                "quarantine for 10 minutes: the writer of an ended transfer has neither said that it is drained, nor is it gone."
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
            summary="Rank {{ $labels.rank }} of {{ $labels.instance }} loses its ring to quarantine.",
            description=(
                "{{ $value | humanizePercentage }} of the ring of rank {{ $labels.rank }} of {{ $labels.instance }} is in "
                "quarantine, and it grows, or is more than a quarter. When all of it is there, no KV comes to this rank any "
                "more."
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
                "While they are busy, the links of rank {{ $labels.rank }} of the prefill node {{ $labels.instance }}, or one of "
                "them, write at {{ $value | humanizePercentage }} of the speed that was measured when they were attached. KV "
                "takes that much longer, and users wait for it."
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
            name="KvferryChunksBroken",
            severity=WARNING,
            expr="increase(kvferry_broken_chunks_total[15m]) > 0",
            lasts="0m",
            summary="KV arrived broken on rank {{ $labels.rank }} of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} chunks came to rank {{ $labels.rank }} of {{ $labels.instance }} with another digest "
                "than they were sent with, in 15 minutes. Each is sent once more; what breaks twice fails its request."
            ),
        ),
        Alert(
            name="KvferryChunksBreakOften",
            severity=CRITICAL,
            expr="rate(kvferry_broken_chunks_total[5m]) / rate(kvferry_chunks_total[5m]) > 0.01",
            lasts="2m",
            summary="Much KV arrives broken on rank {{ $labels.rank }} of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanizePercentage }} of the chunks that come to rank {{ $labels.rank }} of {{ $labels.instance }} "
                "have another digest than they were sent with. Requests fail with DATA_LOSS."
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
            summary="Requests pile up on {{ $labels.role }} node {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} requests wait on the {{ $labels.role }} node {{ $labels.instance }}: half as many again "
                "as 10 minutes ago, or more than half of limits.max_queued_requests, at which it refuses more."
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
                "{{ $value | humanizePercentage }} of the requests to the {{ $labels.role }} node {{ $labels.instance }} are "
                "turned away: it has no room, does not serve now, or they can never be served."
            ),
        ),
        Alert(
            name="KvferryRequestsFail",
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
                "an error. On a decode node their clients see it; those of a prefill node may be tried on another one."
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
                "The certificate that the {{ $labels.role }} node {{ $labels.instance }} uses is good for {{ $value | "
                "humanizeDuration }} more. After that no new connection is made."
            ),
        ),
        Alert(
            name="KvferryCertificateExpiresNow",
            severity=CRITICAL,
            expr="kvferry_certificate_expiry_timestamp_seconds - time() < 3600",
            lasts="0m",
            summary="The certificate of {{ $labels.role }} node {{ $labels.instance }} expires within the hour, or has expired.",
            description=(
                "The certificate that the {{ $labels.role }} node {{ $labels.instance }} uses is good for {{ $value | "
                "humanizeDuration }} more. Then peers that restart cannot join, and clients cannot connect."
            ),
        ),
        Alert(
            name="KvferryCertificateStale",
            severity=WARNING,
            expr="kvferry_certificate_stale == 1",
            lasts="5m",
            summary="{{ $labels.role }} node {{ $labels.instance }} cannot use its new certificate files.",
            description=(
                "The certificate files of the {{ $labels.role }} node {{ $labels.instance }} have changed, and what is there now "
                "cannot be used. It goes on with the certificate that it had, until that expires."
            ),
        ),
        Alert(
            name="KvferryStrangersKnock",
            severity=WARNING,
            expr="sum by (job, role, instance) (rate(kvferry_refused_connections_total[5m])) > 0",
            lasts="15m",
            summary="Somebody without a key connects to control ports of {{ $labels.instance }}.",
            description=(
                "{{ $value | humanize }} connections a second to control ports of the {{ $labels.role }} node {{ "
                "$labels.instance }} showed no key of an attached writer, for 15 minutes. They were refused."
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
            name="KvferryMemoryNotAsPlanned",
            severity=WARNING,
            expr=(
                "(kvferry_memory_real_bytes / kvferry_memory_planned_bytes > 1.1) and "
                "(kvferry_memory_real_bytes - kvferry_memory_planned_bytes > 268435456)"
            ),
            lasts="10m",
            summary="Line {{ $labels.line }} of rank {{ $labels.rank }} of {{ $labels.instance }} takes more than planned.",
            description=(
                "Line {{ $labels.line }} of the memory plan came to {{ $value | humanizePercentage }} of what was planned, on "
                "rank {{ $labels.rank }} of the {{ $labels.role }} node {{ $labels.instance }}. What the plan keeps free is "
                "smaller by that."
            ),
        ),
        Alert(
            name="KvferryStoreCircuitOpen",
            severity=WARNING,
            expr='sum by (job, role, instance, direction) (kvferry_store_circuit{state!="closed"}) > 0',
            lasts="5m",
            summary="{{ $labels.role }} node {{ $labels.instance }} leaves its store alone ({{ $labels.direction }}).",
            description=(
                "{{ $value }} processes of the {{ $labels.role }} node {{ $labels.instance }} have left the store alone for 5 "
                "minutes ({{ $labels.direction }}): it fails, or hangs. Requests go on without it, and compute what it has."
            ),
        ),
    ),
)

ALERTS: Final[tuple[Group, ...]] = (NODES, TRANSFER, REQUESTS, SECURITY, MEMORY)
