"""When each alert fires, with what it says, and when it does not: data of tests/deploy/monitoring/test_alerts.py.

Series are in promtool's notation, one value a minute: "0+5x10" grows by five ten times, "0x10" stays, "_x5" is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

PREFILL: Final = 'job="kvferry", instance="p:7180", role="prefill"'
DECODE: Final = 'job="kvferry", instance="d:7180", role="decode"'
RANK: Final = f'{DECODE}, rank="1"'

OF_PREFILL: Final = {"job": "kvferry", "instance": "p:7180", "role": "prefill"}
OF_DECODE: Final = {"job": "kvferry", "instance": "d:7180", "role": "decode"}
OF_RANK: Final = OF_DECODE | {"rank": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fires:
    """One alert that is there.

    Args:
        labels: Of the alert, besides its name and severity.
        value: What its annotations say for ``{{ $value ... }}``.
    """

    labels: Mapping[str, str]
    value: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series, and what an alert makes of them.

    Args:
        alert: Its name.
        what: What happens in the cluster.
        series: Values by series; the names of all metrics that the alert reads are among them.
        at: When it is looked at, since the series began.
        fires: Empty: it must not.
    """

    alert: str
    what: str
    series: Mapping[str, str]
    at: str
    fires: tuple[Fires, ...] = field(default=())


_STEADY: Final = "50 54 49 51 50 47 52 51 55 48 53 50 49 54 50 52 51 50 55 49 53 50 51 52 50 49"


def _queue(queued: str, most: str = "256x60") -> dict[str, str]:
    """Requests that wait on a node, and how many may."""
    return {f"kvferry_queued_requests{{{DECODE}}}": queued, f"kvferry_max_queued_requests{{{DECODE}}}": most}


def _nodes(*, prefill: str = "1x60", decode: str = "1x60") -> dict[str, str]:
    return {f"kvferry_build_info{{{PREFILL}}}": prefill, f"kvferry_build_info{{{DECODE}}}": decode}


def _links(*links: tuple[float, float], nodes: int = 1) -> dict[str, str]:
    """Of one prefill rank: a link to each of the decode ranks, with what its probe and busy seconds grow by in a minute.

    Args:
        nodes: The links are those to the first ranks of so many nodes; one by one, then, they are the same series.
    """
    shares = [(busy_s / 60, probe_s / busy_s) for probe_s, busy_s in links if busy_s]
    slowest = min((share for used, share in shares if used > 0.2), default=-1)
    fastest = max((share for used, share in shares if used > 0.01), default=-1)
    series = {
        f'kvferry_slowest_link_ratio{{{PREFILL}, rank="0"}}': f"{slowest:g}x60",
        f'kvferry_fastest_link_ratio{{{PREFILL}, rank="0"}}': f"{fastest:g}x60",
    }
    if nodes > 1:
        links = ((sum(probe_s for probe_s, _ in links), min(60.0, sum(busy_s for _, busy_s in links))),)
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


def _memory(planned: str, real: str) -> dict[str, str]:
    series = f'{{{RANK}, line="weights"}}'
    return {f"kvferry_memory_planned_bytes{series}": planned, f"kvferry_memory_real_bytes{series}": real}


def _turns(all_turns: str, short: str, where: str = RANK) -> dict[str, str]:
    return {
        f"kvferry_loop_turn_seconds_count{{{where}}}": all_turns,
        f'kvferry_loop_turn_seconds_bucket{{{where}, le="0.25"}}': short,
    }


def _expires_in(seconds: int) -> dict[str, str]:
    """Seconds after the begin of the series, which is the beginning of time."""
    return {f"kvferry_certificate_expiry_timestamp_seconds{{{DECODE}}}": f"{seconds}x40"}


CASES: Final = (
    Case(
        alert="KvferryTargetDown",
        what="a node is gone for two minutes",
        series={'up{job="kvferry", instance="d:7180"}': "1x5 0x10", 'up{job="kvferry", instance="p:7180"}': "1x20"},
        at="8m",
        fires=(Fires(labels={"job": "kvferry", "instance": "d:7180"}),),
    ),
    Case(
        alert="KvferryTargetDown",
        what="a pod of Kubernetes, whose job has the namespace in front",
        series={'up{job="serving/kvferry-decode", instance="10.0.0.7:7180"}': "0x10"},
        at="3m",
        fires=(Fires(labels={"job": "serving/kvferry-decode", "instance": "10.0.0.7:7180"}),),
    ),
    Case(
        alert="KvferryTargetDown",
        what="a node misses one scrape; another job is down",
        series={'up{job="kvferry", instance="d:7180"}': "1x5 0 1x10", 'up{job="node", instance="d:9100"}': "0x20"},
        at="8m",
    ),
    Case(
        alert="KvferryTierMissing",
        what="the last decode node is gone",
        series=_nodes(decode="1x5 _x20"),
        at="16m",
        fires=(Fires(labels={"role": "decode"}),),
    ),
    Case(alert="KvferryTierMissing", what="both tiers are there", series=_nodes(), at="16m"),
    Case(
        alert="KvferryTierMissing",
        what="the last decode node comes back in time",
        series=_nodes(decode="1x5 _x6 1x20"),
        at="16m",
    ),
    Case(
        alert="KvferryNodeNotServing",
        what="a node loads its weights for ever",
        series={f'kvferry_node_state{{{DECODE}, state="ready"}}': "0x30"},
        at="16m",
        fires=(Fires(labels=OF_DECODE | {"state": "ready"}),),
    ),
    Case(
        alert="KvferryNodeNotServing",
        what="a node drains, ends and starts again",
        series={f'kvferry_node_state{{{DECODE}, state="ready"}}': "1x5 0x10 1x10"},
        at="20m",
    ),
    Case(
        alert="KvferryNodeKeepsStarting",
        what="a node starts for a minute, ends, and is away for another one",
        series={f"kvferry_start_time_seconds{{{DECODE}}}": "0 _ 120 _ 240 _ 360 _ 480 _ 600 _ 720"},
        at="7m",
        fires=(Fires(labels=OF_DECODE, value="3"),),
    ),
    Case(
        alert="KvferryNodeKeepsStarting",
        what="a node loads for ten minutes, ends, and is away for five: two starts in half an hour, each time",
        series={f"kvferry_start_time_seconds{{{DECODE}}}": "0x9 _x4 900x9 _x4 1800x9 _x4 2700x9"},
        at="50m",
        fires=(Fires(labels=OF_DECODE, value="3"),),
    ),
    Case(
        alert="KvferryNodeKeepsStarting",
        what="three starts in two hours",
        series={f"kvferry_start_time_seconds{{{DECODE}}}": "0x19 2400x39 4800x39 7200x39"},
        at="125m",
    ),
    Case(
        alert="KvferryNodeKeepsStarting",
        what="a node is upgraded, and taken back a little later",
        series={f"kvferry_start_time_seconds{{{DECODE}}}": "0x10 _x2 780x5 _x2 1260x20"},
        at="30m",
    ),
    Case(
        alert="KvferryRanksRestart",
        what="the ranks are started a third time, after two of long ago",
        series={f"kvferry_rank_restarts{{{DECODE}}}": "2x40 3x10"},
        at="45m",
        fires=(Fires(labels=OF_DECODE, value="1"),),
    ),
    Case(
        alert="KvferryRanksRestart",
        what="two restarts of long ago; the node itself is started anew",
        series={f"kvferry_rank_restarts{{{DECODE}}}": "2x40 0x10"},
        at="45m",
    ),
    Case(
        alert="KvferryRanksCrashOften",
        what="a restart every five minutes",
        series={f"kvferry_rank_restarts{{{DECODE}}}": "0x5 1x5 2x5 3x5"},
        at="20m",
        fires=(Fires(labels=OF_DECODE, value="3"),),
    ),
    Case(
        alert="KvferryRanksCrashOften",
        what="two restarts in half an hour",
        series={f"kvferry_rank_restarts{{{DECODE}}}": "5x10 6x5 7x20"},
        at="30m",
    ),
    Case(
        alert="KvferryLoopTurnsLong",
        what="a rank whose loop stands still once a minute",
        series=_turns("100+61x30", "100+60x30"),
        at="20m",
        fires=(Fires(labels=OF_RANK, value="10"),),
    ),
    Case(
        alert="KvferryLoopTurnsLong",
        what="a leader whose loop stands still once a minute",
        series=_turns("100+61x30", "100+60x30", DECODE),
        at="20m",
        fires=(Fires(labels=OF_DECODE, value="10"),),
    ),
    Case(
        alert="KvferryLoopTurnsLong",
        what="a single stop of the machine",
        series=_turns("100+60x9 703+60x20", "100+60x9 700+60x20"),
        at="12m",
    ),
    Case(
        alert="KvferryLoopTurnsLong",
        what="busy, and never long",
        series=_turns("100+60000x30", "100+60000x30"),
        at="20m",
    ),
    Case(
        alert="KvferryNoPeers",
        what="the only prefill node is lost",
        series=_peers(joined="1x5 0x10"),
        at="8m",
        fires=(Fires(labels=OF_DECODE | {"state": "joined"}),),
    ),
    Case(
        alert="KvferryNoPeers",
        what="one of two is lost, and a prefill node has no decode node yet",
        series=_peers(joined="2x5 1x10") | {f'kvferry_peers{{{PREFILL}, state="joined"}}': "0x20"},
        at="8m",
    ),
    Case(
        alert="KvferryNoPeers",
        what="the decode node still loads its weights",
        series=_peers(starting="1x30", joined="0x30"),
        at="8m",
    ),
    Case(
        alert="KvferryPeersDown",
        what="one prefill node is lost, and another one was never there",
        series=_peers(joining="1x30", lost="0x5 1x30", joined="2x5 1x20"),
        at="17m",
        fires=(Fires(labels=OF_DECODE, value="2"),),
    ),
    Case(
        alert="KvferryPeersDown",
        what="one prefill node is started again, another one drains",
        series=_peers(lost="0x5 1x8 0x20", draining="1x20"),
        at="17m",
    ),
    Case(
        alert="KvferryPeersDown",
        what="the decode node still loads its weights",
        series=_peers(starting="1x30", joining="2x30"),
        at="17m",
    ),
    Case(
        alert="KvferryBreakerOpen",
        what="a breaker opens, tries, and opens again",
        series={
            f'kvferry_breakers{{{DECODE}, state="open"}}': "0x3 1 1 0 1 1 0 1 1 0 1 1 0 1",
            f'kvferry_breakers{{{DECODE}, state="half-open"}}': "0x3 0 0 1 0 0 1 0 0 1 0 0 1 0",
            f'kvferry_breakers{{{DECODE}, state="closed"}}': "1x20",
        },
        at="12m",
        fires=(Fires(labels=OF_DECODE, value="1"),),
    ),
    Case(
        alert="KvferryBreakerOpen",
        what="a breaker is open for three minutes",
        series={
            f'kvferry_breakers{{{DECODE}, state="open"}}': "0x3 1x3 0x20",
            f'kvferry_breakers{{{DECODE}, state="closed"}}': "2x20",
        },
        at="12m",
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="etcd is away",
        series=_discovery("0x5 0+60x20"),
        at="20m",
        fires=(Fires(labels=OF_DECODE, value="14m 0s"),),
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="looks are an hour apart, and the last one hangs",
        series=_discovery("0+60x300", interval_s=3600),
        at="200m",
        fires=(Fires(labels=OF_DECODE, value="3h 20m 0s"),),
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="looks are an hour apart, and good",
        series=_discovery("0+60x59 0+60x59 0+60x59 0+60x59", interval_s=3600),
        at="200m",
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="etcd was away already when the node started",
        series=_discovery("-1x20"),
        at="20m",
        fires=(Fires(labels=OF_DECODE, value="-1s"),),
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="one look in three fails",
        series=_discovery("0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10 0 5 10"),
        at="20m",
    ),
    Case(
        alert="KvferryDiscoveryFails", what="a list that is looked at once", series=_discovery("0+60x30", interval_s=0), at="20m"
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="a prefill node loads for 20 minutes, registers, is drained for 20, and registers again",
        series=_discovery("0x20 1x10 0x20 1x10", interval_s="0x20 3x10 0x20 3x10", node=PREFILL),
        at="60m",
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="a prefill node has loaded, and never reaches etcd",
        series=_discovery("0x10 -1x20", interval_s="0x10 3x20", node=PREFILL),
        at="20m",
        fires=(Fires(labels=OF_PREFILL, value="-1s"),),
    ),
    Case(
        alert="KvferryDiscoveryFails",
        what="a prefill node is drained while etcd is away, and cannot take its entry back",
        series=_discovery("1x5 0+60x20", interval_s=3, node=PREFILL),
        at="20m",
        fires=(Fires(labels=OF_PREFILL, value="14m 0s"),),
    ),
    Case(
        alert="KvferryJoinFaults",
        what="a join breaks",
        series={f"kvferry_join_faults_total{{{DECODE}}}": "0x20 3x4"},
        at="21m",
        fires=(Fires(labels=OF_DECODE, value="3"),),
    ),
    Case(
        alert="KvferryJoinFaults",
        what="a join broke an hour ago",
        series={f"kvferry_join_faults_total{{{DECODE}}}": "0x5 3x60"},
        at="60m",
    ),
    Case(
        alert="KvferryWatermarkStalled",
        what="a scatter never ends, or a writer is stuck that is in no quarantine",
        series={f"kvferry_ring_watermark_stalled_seconds{{{RANK}}}": "0x5 0+60x30"},
        at="9m",
        fires=(Fires(labels=OF_RANK, value="3m 0s"),),
    ),
    Case(
        alert="KvferryWatermarkStalled",
        what="prompts whose chunks take half a minute to compute",
        series={f"kvferry_ring_watermark_stalled_seconds{{{RANK}}}": "0 30 2 28 5 30 0 31 25 30 0 30"},
        at="9m",
    ),
    Case(
        alert="KvferryWatermarkStalled",
        what="one long wait that is over",
        series={f"kvferry_ring_watermark_stalled_seconds{{{RANK}}}": "0x5 50 70 0x20"},
        at="9m",
    ),
    Case(
        alert="KvferryQuarantineStays",
        what="a writer is frozen",
        series=_quarantine("0x2 150x30"),
        at="20m",
        fires=(Fires(labels=OF_RANK, value="15%"),),
    ),
    Case(
        alert="KvferryQuarantineStays",
        what="aborts, whose writers drain at once",
        series=_quarantine("0 150 0 150 150 0 150 150 150 0 150 0 0 150 0 150 150 0 150 150 150"),
        at="20m",
    ),
    Case(
        alert="KvferryQuarantineGrowing",
        what="bytes come into quarantine, and none comes out",
        series=_quarantine("0 0+5x40"),
        at="30m",
        fires=(Fires(labels=OF_RANK, value="14.5%"),),
    ),
    Case(
        alert="KvferryQuarantineGrowing",
        what="a third of the ring at once",
        series=_quarantine("0x5 330x20"),
        at="12m",
        fires=(Fires(labels=OF_RANK, value="33%"),),
    ),
    Case(alert="KvferryQuarantineGrowing", what="a little stays", series=_quarantine("0x2 150x40"), at="30m"),
    Case(
        alert="KvferryQuarantineGrowing",
        what="aborts, whose writers drain at once",
        series=_quarantine("0 400 0 200 400 0 200 200 400 0 200 0 0 400 0 200 200 0 400 200 400"),
        at="20m",
    ),
    Case(
        alert="KvferryLinkSlow",
        what="a link that is in use all the time takes ten times what its probe says",
        series=_links((6, 60)),
        at="20m",
        fires=(Fires(labels=OF_PREFILL | {"rank": "0"}, value="10%"),),
    ),
    Case(
        alert="KvferryLinkSlow",
        what="a card with two links has a tenth of what it had",
        series=_links((3, 60), (3, 60)),
        at="20m",
        fires=(Fires(labels=OF_PREFILL | {"rank": "0"}, value="10%"),),
    ),
    Case(
        alert="KvferryLinkSlow",
        what="of four links with equal traffic one is ten times slower than its probe",
        series=_links((6, 60), (6, 6), (6, 7.5), (6, 10)),
        at="20m",
        fires=(Fires(labels=OF_PREFILL | {"rank": "0"}, value="10%"),),
    ),
    Case(
        alert="KvferryLinkSlow",
        what="of links to 18 nodes one is ten times slower than its probe",
        series=_links((6, 60), *[(6, 6.5)] * 17, nodes=18),
        at="20m",
        fires=(Fires(labels=OF_PREFILL | {"rank": "0"}, value="10%"),),
    ),
    Case(
        alert="KvferryLinkSlow",
        what="of four links one hangs: no write ends, and others go on",
        series=_links((0, 60), (30, 30), (30, 30), (30, 30)),
        at="20m",
        fires=(Fires(labels=OF_PREFILL | {"rank": "0"}, value="0%"),),
    ),
    Case(
        alert="KvferryLinkSlow",
        what="ten links share a card that is full: each has a tenth of its probe",
        series=_links(*[(6, 60)] * 10),
        at="20m",
    ),
    Case(
        alert="KvferryLinkSlow",
        what="of links on a full card some are twice as fast as others",
        series=_links(*[(6, 60)] * 4, *[(12, 60)] * 3),
        at="20m",
    ),
    Case(
        alert="KvferryLinkSlow",
        what="a card that is full, and a link on it that was used alone for a moment",
        series=_links(*[(7.5, 60)] * 8, (0.3, 0.3)),
        at="20m",
    ),
    Case(alert="KvferryLinkSlow", what="slow links that hardly anybody uses", series=_links((0.6, 6), (6, 6)), at="20m"),
    Case(alert="KvferryLinkSlow", what="nothing is written", series=_links((0, 0), (0, 0)), at="20m"),
    Case(alert="KvferryLinkSlow", what="links as fast as their probes", series=_links((50, 55), (5, 5)), at="20m"),
    Case(
        alert="KvferryTransportFellBack",
        what="two links cannot have shared memory",
        series={f"kvferry_links_fallen_back{{{RANK}}}": "0x3 2x20"},
        at="10m",
        fires=(Fires(labels=OF_RANK, value="2"),),
    ),
    Case(
        alert="KvferryTransportFellBack",
        what="all links have what they can have",
        series={f"kvferry_links_fallen_back{{{RANK}}}": "0x20"},
        at="10m",
    ),
    Case(
        alert="KvferryChunksBroken",
        what="two chunks arrive broken",
        series=_chunks("0x20 2x4", "0+1000x30"),
        at="21m",
        fires=(Fires(labels=OF_RANK, value="2"),),
    ),
    Case(alert="KvferryChunksBroken", what="no chunk is broken", series=_chunks("2x30", "0+1000x30"), at="21m"),
    Case(
        alert="KvferryChunksBreakOften",
        what="one chunk in fifty is broken",
        series=_chunks("0+20x30", "0+1000x30"),
        at="10m",
        fires=(Fires(labels=OF_RANK, value="2%"),),
    ),
    Case(alert="KvferryChunksBreakOften", what="one chunk in a thousand", series=_chunks("0+1x30", "0+1000x30"), at="10m"),
    Case(alert="KvferryChunksBreakOften", what="no chunk at all", series=_chunks("0x30", "0x30"), at="10m"),
    Case(
        alert="KvferryQueueGrowing",
        what="more come than are served",
        series=_queue("0x10 2+2x30"),
        at="25m",
        fires=(Fires(labels=OF_DECODE, value="25"),),
    ),
    Case(
        alert="KvferryQueueGrowing",
        what="more come than are served, and nobody knows how many may wait: an engine hosts the side",
        series=_queue("0x10 2+2x30", most="_x60"),
        at="25m",
        fires=(Fires(labels=OF_DECODE, value="25"),),
    ),
    Case(
        alert="KvferryQueueGrowing",
        what="a node that has started seven minutes ago, and more than half of its queue is taken",
        series=_queue("160x7", most="256x7"),
        at="7m",
        fires=(Fires(labels=OF_DECODE, value="160"),),
    ),
    Case(
        alert="KvferryQueueGrowing",
        what="a queue that stays as it is, more than half full",
        series=_queue("160x60"),
        at="40m",
        fires=(Fires(labels=OF_DECODE, value="160"),),
    ),
    Case(alert="KvferryQueueGrowing", what="a long queue that stays as it is", series=_queue(_STEADY), at="25m"),
    Case(
        alert="KvferryQueueGrowing",
        what="a long queue that stays as it is where an engine hosts the side",
        series=_queue("160x60", most="_x60"),
        at="40m",
    ),
    Case(
        alert="KvferryQueueGrowing",
        what="a young node whose first requests wait a while",
        series=_queue("200x3 40x4", most="256x7"),
        at="7m",
    ),
    Case(
        alert="KvferryQueueGrowing",
        what="a wave of requests that is worked off",
        series=_queue("0x12 40 30 20 10 0x30"),
        at="20m",
    ),
    Case(
        alert="KvferryQueueGrowing",
        what="a wave of requests that fills the queue, and is worked off",
        series=_queue("0x12 250 190 100 40 0x30"),
        at="17m",
    ),
    Case(
        alert="KvferryRequestsRefused",
        what="a quarter is turned away",
        series=_requests(done="0+30x30", refused="0+10x30", failed="0x30"),
        at="15m",
        fires=(Fires(labels=OF_DECODE, value="25%"),),
    ),
    Case(
        alert="KvferryRequestsRefused",
        what="one in a hundred is turned away",
        series=_requests(done="0+99x30", refused="0+1x30", failed="0x30"),
        at="15m",
    ),
    Case(
        alert="KvferryRequestsRefused",
        what="one request that could never be served, and no other",
        series=_requests(done="0x30", refused="0x9 1x20", failed="0x30"),
        at="14m",
    ),
    Case(
        alert="KvferryRequestsFail",
        what="one in ten fails",
        series=_requests(done="0+90x30", refused="0x30", failed="0+10x30"),
        at="15m",
        fires=(Fires(labels=OF_DECODE, value="10%"),),
    ),
    Case(
        alert="KvferryRequestsFail",
        what="clients give most up, and of the others every fifth fails",
        series=_requests(done="0+4x30", refused="0x30", aborted="0+95x30", failed="0+1x30"),
        at="15m",
        fires=(Fires(labels=OF_DECODE, value="20%"),),
    ),
    Case(
        alert="KvferryRequestsRefused",
        what="clients give most up, and of the others every fifth is turned away",
        series=_requests(done="0+4x30", refused="0+1x30", aborted="0+95x30", failed="0x30"),
        at="15m",
        fires=(Fires(labels=OF_DECODE, value="20%"),),
    ),
    Case(
        alert="KvferryRequestsFail",
        what="clients go away, and one in a hundred fails",
        series=_requests(done="0+80x30", aborted="0+19x30", failed="0+1x30"),
        at="15m",
    ),
    Case(
        alert="KvferryRequestsFail",
        what="a request now and then, and one of them fails",
        series=_requests(done="0x5 1x5 2x20", refused="0x30", failed="0x9 1x20"),
        at="14m",
    ),
    Case(
        alert="KvferryRequestsFail",
        what="some failed, and then nobody asks",
        series=_requests(done="0 10x30", aborted="0x30", failed="0 10x30"),
        at="15m",
    ),
    Case(
        alert="KvferryCertificateExpiresSoon",
        what="three hours are left",
        series=_expires_in(3 * 3600 + 1200),
        at="20m",
        fires=(Fires(labels=OF_DECODE, value="3h 0m 0s"),),
    ),
    Case(alert="KvferryCertificateExpiresSoon", what="two days are left", series=_expires_in(48 * 3600), at="20m"),
    Case(
        alert="KvferryCertificateExpiresNow",
        what="it has expired",
        series=_expires_in(1200),
        at="30m",
        fires=(Fires(labels=OF_DECODE, value="-10m 0s"),),
    ),
    Case(alert="KvferryCertificateExpiresNow", what="three hours are left", series=_expires_in(3 * 3600), at="20m"),
    Case(
        alert="KvferryCertificateStale",
        what="a key was written that belongs to another certificate",
        series={f"kvferry_certificate_stale{{{DECODE}}}": "0x5 1x20"},
        at="12m",
        fires=(Fires(labels=OF_DECODE),),
    ),
    Case(
        alert="KvferryCertificateStale",
        what="certificate and key are written a minute after each other",
        series={f"kvferry_certificate_stale{{{DECODE}}}": "0x5 1 0x20"},
        at="12m",
    ),
    Case(
        alert="KvferryStrangersKnock",
        what="somebody tries the ports of two ranks",
        series={
            f'kvferry_refused_connections_total{{{DECODE}, rank="0"}}': "0+60x40",
            f"kvferry_refused_connections_total{{{RANK}}}": "0+60x40",
        },
        at="20m",
        fires=(Fires(labels=OF_DECODE, value="2"),),
    ),
    Case(
        alert="KvferryStrangersKnock",
        what="one connection, once",
        series={f"kvferry_refused_connections_total{{{RANK}}}": "0x5 1x40"},
        at="20m",
    ),
    Case(
        alert="KvferryOutOfMemory",
        what="steps find no memory, as soon as the first scrape sees it",
        series={f"kvferry_out_of_memory_steps_total{{{DECODE}}}": "0x20 3x4"},
        at="21m",
        fires=(Fires(labels=OF_DECODE, value="3"),),
    ),
    Case(
        alert="KvferryOutOfMemory",
        what="a step found no memory an hour ago",
        series={f"kvferry_out_of_memory_steps_total{{{DECODE}}}": "0x5 3x60"},
        at="60m",
    ),
    Case(
        alert="KvferryPoolFull",
        what="requests wait for pages for more than ten minutes",
        series={f"kvferry_requests_waiting_for_pages{{{DECODE}}}": "0x2 3 5 2 4x20"},
        at="14m",
        fires=(Fires(labels=OF_DECODE, value="4"),),
    ),
    Case(
        alert="KvferryPoolFull",
        what="a pool that has room again every few minutes",
        series={f"kvferry_requests_waiting_for_pages{{{PREFILL}}}": "0 5 6 4 0 7 8 9 0 5 6 7 0 8 8 8 0 5 5 5"},
        at="19m",
    ),
    Case(
        alert="KvferryMemoryNotAsPlanned",
        what="weights take a quarter more, which is a gibibyte",
        series=_memory("4294967296x30", "5368709120x30"),
        at="12m",
        fires=(Fires(labels=OF_RANK | {"line": "weights"}, value="125%"),),
    ),
    Case(
        alert="KvferryMemoryNotAsPlanned",
        what="a quarter more of a small model; 5 % more of a large one",
        series=_memory("4194304x30", "5242880x30")
        | {
            f'kvferry_memory_planned_bytes{{{DECODE}, rank="0", line="weights"}}': "42949672960x30",
            f'kvferry_memory_real_bytes{{{DECODE}, rank="0", line="weights"}}': "45097156608x30",
        },
        at="12m",
    ),
    Case(
        alert="KvferryStoreCircuitOpen",
        what="the leader and a rank cannot read from the store",
        series={
            f'kvferry_store_circuit{{{DECODE}, direction="read", state="open"}}': "1x20",
            f'kvferry_store_circuit{{{RANK}, direction="read", state="open"}}': "1x20",
            f'kvferry_store_circuit{{{RANK}, direction="write", state="open"}}': "0x20",
            f'kvferry_store_circuit{{{RANK}, direction="write", state="closed"}}': "1x20",
        },
        at="12m",
        fires=(Fires(labels=OF_DECODE | {"direction": "read"}, value="2"),),
    ),
    Case(
        alert="KvferryStoreCircuitOpen",
        what="the store was away for two minutes",
        series={
            f'kvferry_store_circuit{{{RANK}, direction="read", state="open"}}': "0x2 1x2 0x20",
            f'kvferry_store_circuit{{{RANK}, direction="read", state="closed"}}': "1x2 0x2 1x20",
        },
        at="12m",
    ),
)
