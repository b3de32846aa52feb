"""Cases of tests/deploy/monitoring/test_alerts.py: series for which an alert fires, with its texts, or does not fire.

Series use promtool's notation with one value per minute: "0+5x10" grows by five ten times, "0x10" is constant, "_x5" is absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PREFILL: Final = 'job="kvferry", instance="p:7180", role="prefill"'
DECODE: Final = 'job="kvferry", instance="d:7180", role="decode"'
RANK: Final = f'{DECODE}, rank="1"'

OF_PREFILL: Final = {"job": "kvferry", "instance": "p:7180", "role": "prefill"}
OF_DECODE: Final = {"job": "kvferry", "instance": "d:7180", "role": "decode"}
OF_RANK: Final = OF_DECODE | {"rank": "1"}


class Fires:
    """An alert that fires; `value` replaces ``{{ $value ... }}`` in its annotations."""

    def __init__(self, labels: Mapping[str, str], value: str = "") -> None:
        self.labels, self.value = labels, value


class Case:
    """Series, and the alerts that fire for them.

    Args:
        what: Description of the situation.
        series: Values by series, at least one series for each metric that the alert reads.
        at: Time of the evaluation since the start of the series.
        fires: Expected alerts; empty if the alert must not fire.
    """

    def __init__(self, what: str, series: Mapping[str, str], at: str, *fires: Fires) -> None:
        self.what, self.series, self.at, self.fires = what, series, at, fires


def _one(metric: str, values: str, where: str = DECODE, **labels: str) -> dict[str, str]:
    """Return one series of a node or rank."""
    matched = ", ".join([where, *(f'{name}="{value}"' for name, value in labels.items())])
    return {f"kvferry_{metric}{{{matched}}}": values}


def _queue(queued: str, most: str = "256x60") -> dict[str, str]:
    """Return the series of the queued requests of a node and of their limit."""
    return {f"kvferry_queued_requests{{{DECODE}}}": queued, f"kvferry_max_queued_requests{{{DECODE}}}": most}


def _nodes(*, prefill: str = "1x60", decode: str = "1x60") -> dict[str, str]:
    return {f"kvferry_build_info{{{PREFILL}}}": prefill, f"kvferry_build_info{{{DECODE}}}": decode}


def _links(*links: tuple[float, float]) -> dict[str, str]:
    """Return the series of one prefill rank with a link to each decode rank.

    Args:
        links: Growth of the probe seconds and of the busy seconds per minute, for each link.
    """
    shares = [(busy_s / 60, probe_s / busy_s) for probe_s, busy_s in links if busy_s]
    slowest = min((share for used, share in shares if used > 0.2), default=-1)
    fastest = max((share for used, share in shares if used > 0.01), default=-1)
    series = {
        f'kvferry_slowest_link_ratio{{{PREFILL}, rank="0"}}': f"{slowest:g}x60",
        f'kvferry_fastest_link_ratio{{{PREFILL}, rank="0"}}': f"{fastest:g}x60",
    }
    for decode_rank, (probe_s, busy_s) in enumerate(links):
        labels = f'{{{PREFILL}, rank="0", prefill_rank="0", decode_rank="{decode_rank}", lane="ucx/net"}}'
        series[f"kvferry_link_probe_seconds_total{labels}"] = f"100+{probe_s:g}x60"
        series[f"kvferry_link_busy_seconds_total{labels}"] = f"100+{busy_s:g}x60"
    return series


def _peers(starting: str = "0x30", **states: str) -> dict[str, str]:
    """Return the series of the peers of the decode node by state, and of its state "starting"."""
    series = {f'kvferry_peers{{{DECODE}, state="{state}"}}': values for state, values in states.items()}
    return series | {f'kvferry_node_state{{{DECODE}, state="starting"}}': starting}


def _discovery(age: str, *, interval_s: int | str = 5, node: str = DECODE) -> dict[str, str]:
    """Return the series of discovery; `interval_s` is one number, or values in promtool's notation."""
    return {
        f"kvferry_discovery_age_seconds{{{node}}}": age,
        f"kvferry_discovery_interval_seconds{{{node}}}": interval_s if isinstance(interval_s, str) else f"{interval_s}x400",
    }


def _quarantine(values: str) -> dict[str, str]:
    return {f"kvferry_ring_quarantined_bytes{{{RANK}}}": values, f"kvferry_ring_capacity_bytes{{{RANK}}}": "1000x60"}


def _chunks(broken: str, intact: str) -> dict[str, str]:
    return {f"kvferry_broken_chunks_total{{{RANK}}}": broken, f"kvferry_chunks_total{{{RANK}}}": intact}


def _requests(**outcomes: str) -> dict[str, str]:
    return {f'kvferry_requests_total{{{DECODE}, outcome="{outcome}"}}': values for outcome, values in outcomes.items()}


def _memory(planned: str, real: str, where: str = RANK) -> dict[str, str]:
    return _one("memory_planned_bytes", planned, where, line="weights") | _one("memory_real_bytes", real, where, line="weights")


def _turns(all_turns: str, short: str, where: str = RANK) -> dict[str, str]:
    return {
        f"kvferry_loop_turn_seconds_count{{{where}}}": all_turns,
        f'kvferry_loop_turn_seconds_bucket{{{where}, le="0.25"}}': short,
    }


def _expires_in(seconds: int) -> dict[str, str]:
    """Return the series of a certificate that expires this many seconds after the start of the series, which is time 0."""
    return _one("certificate_expiry_timestamp_seconds", f"{seconds}x40")


# fmt: off
CASES: Final[Mapping[str, tuple[Case, ...]]] = {
    "KvferryTargetDown": (
        Case("a node is gone for two minutes",
             {'up{job="kvferry", instance="d:7180"}': "1x5 0x10",
              'up{job="kvferry", instance="p:7180"}': "1x20"},
             "8m", Fires({"job": "kvferry", "instance": "d:7180"})),
        Case("a pod of Kubernetes with the namespace in its job",
             {'up{job="serving/kvferry-decode", instance="10.0.0.7:7180"}': "0x10"},
             "3m", Fires({"job": "serving/kvferry-decode", "instance": "10.0.0.7:7180"})),
        Case("a node misses one scrape; another job is down",
             {'up{job="kvferry", instance="d:7180"}': "1x5 0 1x10", 'up{job="node", instance="d:9100"}': "0x20"}, "8m"),
    ),
    "KvferryTierMissing": (
        Case("the last decode node is gone", _nodes(decode="1x5 _x20"), "16m", Fires({"role": "decode"})),
        Case("both tiers are there", _nodes(), "16m"),
    ),
    "KvferryNodeNotServing": (
        Case("a node never finishes loading its weights",
             _one("node_state", "0x30", state="ready"), "16m", Fires(OF_DECODE | {"state": "ready"})),
        Case("a node drains, ends and starts again", _one("node_state", "1x5 0x10 1x10", state="ready"), "20m"),
    ),
    "KvferryNodeCrashLooping": (
        Case("a node starts for a minute, ends, and is absent for a minute",
             _one("start_time_seconds", "0 _ 120 _ 240 _ 360 _ 480 _ 600 _ 720"), "7m", Fires(OF_DECODE, "3")),
        Case("three starts in two hours", _one("start_time_seconds", "0x19 2400x39 4800x39 7200x39"), "125m"),
    ),
    "KvferryRanksRestarted": (
        Case("a restart of the ranks, after two old restarts",
             _one("rank_restarts", "2x40 3x10"), "45m", Fires(OF_DECODE, "1")),
        Case("two old restarts; the node itself restarts", _one("rank_restarts", "2x40 0x10"), "45m"),
    ),
    "KvferryRanksCrashLooping": (
        Case("a restart every five minutes", _one("rank_restarts", "0x5 1x5 2x5 3x5"), "20m", Fires(OF_DECODE, "3")),
        Case("two restarts in half an hour", _one("rank_restarts", "5x10 6x5 7x20"), "30m"),
    ),
    "KvferryEventLoopStalls": (
        Case("a rank whose loop blocks once a minute", _turns("100+61x30", "100+60x30"), "20m", Fires(OF_RANK, "10")),
        Case("a single pause of the machine", _turns("100+60x9 703+60x20", "100+60x9 700+60x20"), "12m"),
    ),
    "KvferryNoPeers": (
        Case("the only prefill node is lost", _peers(joined="1x5 0x10"), "8m", Fires(OF_DECODE | {"state": "joined"})),
        Case("one of two is lost, and a prefill node has no decode node yet",
             _peers(joined="2x5 1x10") | _one("peers", "0x20", PREFILL, state="joined"), "8m"),
    ),
    "KvferryPeersDown": (
        Case("one prefill node is lost, and another one never existed",
             _peers(joining="1x30", lost="0x5 1x30", joined="2x5 1x20"), "17m", Fires(OF_DECODE, "2")),
        Case("one prefill node is started again, another one drains", _peers(lost="0x5 1x8 0x20", draining="1x20"), "17m"),
        Case("the decode node still loads its weights", _peers(starting="1x30", joining="2x30"), "17m"),
    ),
    "KvferryBreakerOpen": (
        Case("a breaker opens, is half open, and opens again",
             {f'kvferry_breakers{{{DECODE}, state="open"}}': "0x3 1 1 0 1 1 0 1 1 0 1 1 0 1",
              f'kvferry_breakers{{{DECODE}, state="half-open"}}': "0x3 0 0 1 0 0 1 0 0 1 0 0 1 0",
              f'kvferry_breakers{{{DECODE}, state="closed"}}': "1x20"},
             "12m", Fires(OF_DECODE, "1")),
        Case("a breaker is open for three minutes",
             {f'kvferry_breakers{{{DECODE}, state="open"}}': "0x3 1x3 0x20",
              f'kvferry_breakers{{{DECODE}, state="closed"}}': "2x20"},
             "12m"),
    ),
    "KvferryDiscoveryFails": (
        Case("etcd is unreachable", _discovery("0x5 0+60x20"), "20m", Fires(OF_DECODE, "14m 0s")),
        Case("lookups succeed once an hour", _discovery("0+60x59 0+60x59 0+60x59 0+60x59", interval_s=3600), "200m"),
        Case("one lookup in three fails", _discovery("0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10"), "20m"),
        Case("a list that is read once", _discovery("0+60x30", interval_s=0), "20m"),
        Case("a loaded prefill node never reaches etcd",
             _discovery("0x10 -1x20", interval_s="0x10 3x20", node=PREFILL), "20m", Fires(OF_PREFILL, "-1s")),
    ),
    "KvferryJoinFaults": (
        Case("a join breaks", _one("join_faults_total", "0x20 3x4"), "21m", Fires(OF_DECODE, "3")),
        Case("a join broke an hour ago", _one("join_faults_total", "0x5 3x60"), "60m"),
    ),
    "KvferryWatermarkStalled": (
        Case("a scatter never ends, or a writer without quarantine is stuck",
             _one("ring_watermark_stalled_seconds", "0x5 0+60x30", RANK), "9m", Fires(OF_RANK, "3m 0s")),
        Case("each chunk takes half a minute to compute",
             _one("ring_watermark_stalled_seconds", "0 30 2 28 5 30 0 31 25 30 0 30", RANK), "9m"),
    ),
    "KvferryQuarantineStuck": (
        Case("a writer is frozen", _quarantine("0x2 150x30"), "20m", Fires(OF_RANK, "15%")),
        Case("writers of aborted requests drain at once",
             _quarantine("0 150 0 150 150 0 150 150 150 0 150 0 0 150 0 150 150 0 150 150 150"), "20m"),
    ),
    "KvferryQuarantineGrowing": (
        Case("bytes enter quarantine, and none leaves it", _quarantine("0 0+5x40"), "30m", Fires(OF_RANK, "14.5%")),
        Case("a few bytes stay in quarantine", _quarantine("0x2 150x40"), "30m"),
    ),
    "KvferryLinkSlow": (
        Case("a busy link takes ten times as long as its probe",
             _links((6, 60)), "20m", Fires(OF_PREFILL | {"rank": "0"}, "10%")),
        Case("one of four links hangs, and the others continue",
             _links((0, 60), (30, 30), (30, 30), (30, 30)), "20m", Fires(OF_PREFILL | {"rank": "0"}, "0%")),
        Case("ten links share a saturated card: each has a tenth of its probe", _links(*[(6, 60)] * 10), "20m"),
        Case("slow links with little use", _links((0.6, 6), (6, 6)), "20m"),
        Case("links as fast as their probes", _links((50, 55), (5, 5)), "20m"),
    ),
    "KvferryTransportFellBack": (
        Case("two links cannot have shared memory", _one("links_fallen_back", "0x3 2x20", RANK), "10m", Fires(OF_RANK, "2")),
        Case("all links use their best lane", _one("links_fallen_back", "0x20", RANK), "10m"),
    ),
    "KvferryDigestErrors": (
        Case("two chunks arrive broken", _chunks("0x20 2x4", "0+1000x30"), "21m", Fires(OF_RANK, "2")),
        Case("no chunk is broken", _chunks("2x30", "0+1000x30"), "21m"),
    ),
    "KvferryDigestErrorRateHigh": (
        Case("one chunk in fifty is broken", _chunks("0+20x30", "0+1000x30"), "10m", Fires(OF_RANK, "2%")),
        Case("one chunk in a thousand", _chunks("0+1x30", "0+1000x30"), "10m"),
        Case("no chunk arrives", _chunks("0x30", "0x30"), "10m"),
    ),
    "KvferryQueueGrowing": (
        Case("requests arrive faster than the node serves them", _queue("0x10 2+2x30"), "25m", Fires(OF_DECODE, "25")),
        Case("a node that started seven minutes ago, with a queue more than half full",
             _queue("160x7", most="256x7"), "7m", Fires(OF_DECODE, "160")),
        Case("a constant queue, more than half full", _queue("160x60"), "40m", Fires(OF_DECODE, "160")),
        Case("a burst of requests that the node completes", _queue("0x12 40 30 20 10 0x30"), "20m"),
    ),
    "KvferryRequestsRefused": (
        Case("a quarter is refused",
             _requests(done="0+30x30", refused="0+10x30", failed="0x30"), "15m", Fires(OF_DECODE, "25%")),
        Case("one in a hundred is refused", _requests(done="0+99x30", refused="0+1x30", failed="0x30"), "15m"),
        Case("a single request, which can never be served",
             _requests(done="0x30", refused="0x9 1x20", failed="0x30"), "14m"),
    ),
    "KvferryRequestsFailing": (
        Case("one in ten fails", _requests(done="0+90x30", refused="0x30", failed="0+10x30"), "15m", Fires(OF_DECODE, "10%")),
        Case("few requests, one of which fails",
             _requests(done="0x5 1x5 2x20", refused="0x30", failed="0x9 1x20"), "14m"),
    ),
    "KvferryCertificateExpiresSoon": (
        Case("three hours are left", _expires_in(3 * 3600 + 1200), "20m", Fires(OF_DECODE, "3h 0m 0s")),
        Case("two days are left", _expires_in(48 * 3600), "20m"),
    ),
    "KvferryCertificateExpiresNow": (
        Case("the certificate has expired", _expires_in(1200), "30m", Fires(OF_DECODE, "-10m 0s")),
        Case("three hours are left", _expires_in(3 * 3600), "20m"),
    ),
    "KvferryCertificateStale": (
        Case("the key file belongs to another certificate",
             _one("certificate_stale", "0x5 1x20"), "12m", Fires(OF_DECODE)),
        Case("certificate and key are written a minute apart", _one("certificate_stale", "0x5 1 0x20"), "12m"),
    ),
    "KvferryUnknownConnections": (
        Case("a stranger connects to the ports of two ranks",
             {f'kvferry_refused_connections_total{{{DECODE}, rank="0"}}': "0+60x40",
              f"kvferry_refused_connections_total{{{RANK}}}": "0+60x40"},
             "20m", Fires(OF_DECODE, "2")),
        Case("a single connection", _one("refused_connections_total", "0x5 1x40", RANK), "20m"),
    ),
    "KvferryOutOfMemory": (
        Case("steps run out of memory, at the first scrape afterwards",
             _one("out_of_memory_steps_total", "0x20 3x4"), "21m", Fires(OF_DECODE, "3")),
        Case("a step ran out of memory an hour ago", _one("out_of_memory_steps_total", "0x5 3x60"), "60m"),
    ),
    "KvferryPoolFull": (
        Case("requests wait for pages for more than ten minutes",
             _one("requests_waiting_for_pages", "0x2 3 5 2 4x20"), "14m", Fires(OF_DECODE, "4")),
        Case("a pool with free pages every few minutes",
             _one("requests_waiting_for_pages", "0 5 6 4 0 7 8 9 0 5 6 7 0 8 8 8 0 5 5 5", PREFILL), "19m"),
    ),
    "KvferryHostMemoryFull": (
        Case("requests find no room for half an hour",
             _one("offload_host_full_total", "0x5 0+1x40"), "40m", Fires(OF_DECODE, "10")),
        Case("one burst", _one("offload_host_full_total", "0x5 8x40"), "40m"),
    ),
    "KvferryMemoryAbovePlan": (
        Case("weights take a quarter more than planned, a gibibyte",
             _memory("4294967296x30", "5368709120x30"), "12m", Fires(OF_RANK | {"line": "weights"}, "125%")),
        Case("a small model takes a quarter more, a large one 5 % more",
             _memory("4194304x30", "5242880x30")
             | _memory("42949672960x30", "45097156608x30", f'{DECODE}, rank="0"'),
             "12m"),
    ),
    "KvferryStoreCircuitOpen": (
        Case("the leader and a rank cannot read from the store",
             {f'kvferry_store_circuit{{{DECODE}, direction="read", state="open"}}': "1x20",
              f'kvferry_store_circuit{{{RANK}, direction="read", state="open"}}': "1x20",
              f'kvferry_store_circuit{{{RANK}, direction="write", state="open"}}': "0x20",
              f'kvferry_store_circuit{{{RANK}, direction="write", state="closed"}}': "1x20"},
             "12m", Fires(OF_DECODE | {"direction": "read"}, "2")),
        Case("the store was unreachable for two minutes",
             {f'kvferry_store_circuit{{{RANK}, direction="read", state="open"}}': "0x2 1x2 0x20",
              f'kvferry_store_circuit{{{RANK}, direction="read", state="closed"}}': "1x2 0x2 1x20"},
             "12m"),
    ),
}
# fmt: on
