"""When each alert fires, with what it says, and when it does not: data of tests/deploy/monitoring/test_alerts.py.

Series are in promtool's notation, one value a minute: "0+5x10" grows by five ten times, "0x10" stays, "_x5" is not there.
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
    """An alert that fires; `value` is what its annotations say for ``{{ $value ... }}``."""

    def __init__(self, labels: Mapping[str, str], value: str = "") -> None:
        self.labels, self.value = labels, value


class Case:
    """Series, and what an alert makes of them.

    Args:
        what: What happens in the cluster.
        series: Values by series; the names of all metrics that the alert reads are among them.
        at: When it is looked at, since the series began.
        fires: None: it must not.
    """

    def __init__(self, what: str, series: Mapping[str, str], at: str, *fires: Fires) -> None:
        self.what, self.series, self.at, self.fires = what, series, at, fires


def _one(metric: str, values: str, where: str = DECODE, **labels: str) -> dict[str, str]:
    """One series of a node or rank."""
    matched = ", ".join([where, *(f'{name}="{value}"' for name, value in labels.items())])
    return {f"kvferry_{metric}{{{matched}}}": values}


def _queue(queued: str, most: str = "256x60") -> dict[str, str]:
    """Requests that wait on a node, and how many may."""
    return {f"kvferry_queued_requests{{{DECODE}}}": queued, f"kvferry_max_queued_requests{{{DECODE}}}": most}


def _nodes(*, prefill: str = "1x60", decode: str = "1x60") -> dict[str, str]:
    return {f"kvferry_build_info{{{PREFILL}}}": prefill, f"kvferry_build_info{{{DECODE}}}": decode}


def _links(*links: tuple[float, float]) -> dict[str, str]:
    """Return the series of one prefill rank: a link to each decode rank, with how its probe and busy seconds grow in a minute."""
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
    """As the decode node sees them, which is starting, or not."""
    series = {f'kvferry_peers{{{DECODE}, state="{state}"}}': values for state, values in states.items()}
    return series | {f'kvferry_node_state{{{DECODE}, state="starting"}}': starting}


def _discovery(age: str, *, interval_s: int | str = 5, node: str = DECODE) -> dict[str, str]:
    """Interval: one for all the time, or its values."""
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
    """Seconds after the begin of the series, which is the beginning of time."""
    return _one("certificate_expiry_timestamp_seconds", f"{seconds}x40")


# fmt: off
CASES: Final[Mapping[str, tuple[Case, ...]]] = {
    "KvferryTargetDown": (
        Case("a node is gone for two minutes",
             {'up{job="kvferry", instance="d:7180"}': "1x5 0x10",
              'up{job="kvferry", instance="p:7180"}': "1x20"},
             "8m", Fires({"job": "kvferry", "instance": "d:7180"})),
        Case("a pod of Kubernetes, whose job has the namespace in front",
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
        Case("a node loads its weights for ever",
             _one("node_state", "0x30", state="ready"), "16m", Fires(OF_DECODE | {"state": "ready"})),
        Case("a node drains, ends and starts again", _one("node_state", "1x5 0x10 1x10", state="ready"), "20m"),
    ),
    "KvferryNodeKeepsStarting": (
        Case("a node starts for a minute, ends, and is away for another one",
             _one("start_time_seconds", "0 _ 120 _ 240 _ 360 _ 480 _ 600 _ 720"), "7m", Fires(OF_DECODE, "3")),
        Case("three starts in two hours", _one("start_time_seconds", "0x19 2400x39 4800x39 7200x39"), "125m"),
    ),
    "KvferryRanksRestart": (
        Case("the ranks are started a third time, after two of long ago",
             _one("rank_restarts", "2x40 3x10"), "45m", Fires(OF_DECODE, "1")),
        Case("two restarts of long ago; the node itself is started anew", _one("rank_restarts", "2x40 0x10"), "45m"),
    ),
    "KvferryRanksCrashOften": (
        Case("a restart every five minutes", _one("rank_restarts", "0x5 1x5 2x5 3x5"), "20m", Fires(OF_DECODE, "3")),
        Case("two restarts in half an hour", _one("rank_restarts", "5x10 6x5 7x20"), "30m"),
    ),
    "KvferryLoopTurnsLong": (
        Case("a rank whose loop stands still once a minute", _turns("100+61x30", "100+60x30"), "20m", Fires(OF_RANK, "10")),
        Case("a single stop of the machine", _turns("100+60x9 703+60x20", "100+60x9 700+60x20"), "12m"),
    ),
    "KvferryNoPeers": (
        Case("the only prefill node is lost", _peers(joined="1x5 0x10"), "8m", Fires(OF_DECODE | {"state": "joined"})),
        Case("one of two is lost, and a prefill node has no decode node yet",
             _peers(joined="2x5 1x10") | _one("peers", "0x20", PREFILL, state="joined"), "8m"),
    ),
    "KvferryPeersDown": (
        Case("one prefill node is lost, and another one was never there",
             _peers(joining="1x30", lost="0x5 1x30", joined="2x5 1x20"), "17m", Fires(OF_DECODE, "2")),
        Case("one prefill node is started again, another one drains", _peers(lost="0x5 1x8 0x20", draining="1x20"), "17m"),
        Case("the decode node still loads its weights", _peers(starting="1x30", joining="2x30"), "17m"),
    ),
    "KvferryBreakerOpen": (
        Case("a breaker opens, tries, and opens again",
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
        Case("etcd is away", _discovery("0x5 0+60x20"), "20m", Fires(OF_DECODE, "14m 0s")),
        Case("looks are an hour apart, and good", _discovery("0+60x59 0+60x59 0+60x59 0+60x59", interval_s=3600), "200m"),
        Case("one look in three fails", _discovery("0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10"), "20m"),
        Case("a list that is looked at once", _discovery("0+60x30", interval_s=0), "20m"),
        Case("a prefill node has loaded, and never reaches etcd",
             _discovery("0x10 -1x20", interval_s="0x10 3x20", node=PREFILL), "20m", Fires(OF_PREFILL, "-1s")),
    ),
    "KvferryJoinFaults": (
        Case("a join breaks", _one("join_faults_total", "0x20 3x4"), "21m", Fires(OF_DECODE, "3")),
        Case("a join broke an hour ago", _one("join_faults_total", "0x5 3x60"), "60m"),
    ),
    "KvferryWatermarkStalled": (
        Case("a scatter never ends, or a writer is stuck that is in no quarantine",
             _one("ring_watermark_stalled_seconds", "0x5 0+60x30", RANK), "9m", Fires(OF_RANK, "3m 0s")),
        Case("prompts whose chunks take half a minute to compute",
             _one("ring_watermark_stalled_seconds", "0 30 2 28 5 30 0 31 25 30 0 30", RANK), "9m"),
    ),
    "KvferryQuarantineStays": (
        Case("a writer is frozen", _quarantine("0x2 150x30"), "20m", Fires(OF_RANK, "15%")),
        Case("aborts, whose writers drain at once",
             _quarantine("0 150 0 150 150 0 150 150 150 0 150 0 0 150 0 150 150 0 150 150 150"), "20m"),
    ),
    "KvferryQuarantineGrowing": (
        Case("bytes come into quarantine, and none comes out", _quarantine("0 0+5x40"), "30m", Fires(OF_RANK, "14.5%")),
        Case("a little stays", _quarantine("0x2 150x40"), "30m"),
    ),
    "KvferryLinkSlow": (
        Case("a link that is in use all the time takes ten times what its probe says",
             _links((6, 60)), "20m", Fires(OF_PREFILL | {"rank": "0"}, "10%")),
        Case("of four links one hangs: no write ends, and others go on",
             _links((0, 60), (30, 30), (30, 30), (30, 30)), "20m", Fires(OF_PREFILL | {"rank": "0"}, "0%")),
        Case("ten links share a card that is full: each has a tenth of its probe", _links(*[(6, 60)] * 10), "20m"),
        Case("slow links that hardly anybody uses", _links((0.6, 6), (6, 6)), "20m"),
        Case("links as fast as their probes", _links((50, 55), (5, 5)), "20m"),
    ),
    "KvferryTransportFellBack": (
        Case("two links cannot have shared memory", _one("links_fallen_back", "0x3 2x20", RANK), "10m", Fires(OF_RANK, "2")),
        Case("all links have what they can have", _one("links_fallen_back", "0x20", RANK), "10m"),
    ),
    "KvferryChunksBroken": (
        Case("two chunks arrive broken", _chunks("0x20 2x4", "0+1000x30"), "21m", Fires(OF_RANK, "2")),
        Case("no chunk is broken", _chunks("2x30", "0+1000x30"), "21m"),
    ),
    "KvferryChunksBreakOften": (
        Case("one chunk in fifty is broken", _chunks("0+20x30", "0+1000x30"), "10m", Fires(OF_RANK, "2%")),
        Case("one chunk in a thousand", _chunks("0+1x30", "0+1000x30"), "10m"),
        Case("no chunk at all", _chunks("0x30", "0x30"), "10m"),
    ),
    "KvferryQueueGrowing": (
        Case("more come than are served", _queue("0x10 2+2x30"), "25m", Fires(OF_DECODE, "25")),
        Case("a node that has started seven minutes ago, and more than half of its queue is taken",
             _queue("160x7", most="256x7"), "7m", Fires(OF_DECODE, "160")),
        Case("a queue that stays as it is, more than half full", _queue("160x60"), "40m", Fires(OF_DECODE, "160")),
        Case("a wave of requests that is worked off", _queue("0x12 40 30 20 10 0x30"), "20m"),
    ),
    "KvferryRequestsRefused": (
        Case("a quarter is turned away",
             _requests(done="0+30x30", refused="0+10x30", failed="0x30"), "15m", Fires(OF_DECODE, "25%")),
        Case("one in a hundred is turned away", _requests(done="0+99x30", refused="0+1x30", failed="0x30"), "15m"),
        Case("one request that could never be served, and no other",
             _requests(done="0x30", refused="0x9 1x20", failed="0x30"), "14m"),
    ),
    "KvferryRequestsFail": (
        Case("one in ten fails", _requests(done="0+90x30", refused="0x30", failed="0+10x30"), "15m", Fires(OF_DECODE, "10%")),
        Case("a request now and then, and one of them fails",
             _requests(done="0x5 1x5 2x20", refused="0x30", failed="0x9 1x20"), "14m"),
    ),
    "KvferryCertificateExpiresSoon": (
        Case("three hours are left", _expires_in(3 * 3600 + 1200), "20m", Fires(OF_DECODE, "3h 0m 0s")),
        Case("two days are left", _expires_in(48 * 3600), "20m"),
    ),
    "KvferryCertificateExpiresNow": (
        Case("it has expired", _expires_in(1200), "30m", Fires(OF_DECODE, "-10m 0s")),
        Case("three hours are left", _expires_in(3 * 3600), "20m"),
    ),
    "KvferryCertificateStale": (
        Case("a key was written that belongs to another certificate",
             _one("certificate_stale", "0x5 1x20"), "12m", Fires(OF_DECODE)),
        Case("certificate and key are written a minute after each other", _one("certificate_stale", "0x5 1 0x20"), "12m"),
    ),
    "KvferryStrangersKnock": (
        Case("somebody tries the ports of two ranks",
             {f'kvferry_refused_connections_total{{{DECODE}, rank="0"}}': "0+60x40",
              f"kvferry_refused_connections_total{{{RANK}}}": "0+60x40"},
             "20m", Fires(OF_DECODE, "2")),
        Case("one connection, once", _one("refused_connections_total", "0x5 1x40", RANK), "20m"),
    ),
    "KvferryOutOfMemory": (
        Case("steps find no memory, as soon as the first scrape sees it",
             _one("out_of_memory_steps_total", "0x20 3x4"), "21m", Fires(OF_DECODE, "3")),
        Case("a step found no memory an hour ago", _one("out_of_memory_steps_total", "0x5 3x60"), "60m"),
    ),
    "KvferryPoolFull": (
        Case("requests wait for pages for more than ten minutes",
             _one("requests_waiting_for_pages", "0x2 3 5 2 4x20"), "14m", Fires(OF_DECODE, "4")),
        Case("a pool that has room again every few minutes",
             _one("requests_waiting_for_pages", "0 5 6 4 0 7 8 9 0 5 6 7 0 8 8 8 0 5 5 5", PREFILL), "19m"),
    ),
    "KvferryMemoryNotAsPlanned": (
        Case("weights take a quarter more, which is a gibibyte",
             _memory("4294967296x30", "5368709120x30"), "12m", Fires(OF_RANK | {"line": "weights"}, "125%")),
        Case("a quarter more of a small model; 5 % more of a large one",
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
        Case("the store was away for two minutes",
             {f'kvferry_store_circuit{{{RANK}, direction="read", state="open"}}': "0x2 1x2 0x20",
              f'kvferry_store_circuit{{{RANK}, direction="read", state="closed"}}': "1x2 0x2 1x20"},
             "12m"),
    ),
}
# fmt: on
