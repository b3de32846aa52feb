"""Metrics: what ranks count reaches the leader's page exactly, and the page is what Prometheus can read."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgpack
import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import transfer
from transfer.errors import (
    EngineError,
    IntegrityError,
    PeerUnreachable,
    RemoteProtocolError,
    ResourceExhausted,
    TransferAborted,
    TransferError,
)
from transfer.instance import Link
from transfer.metrics import (
    ABORT_REASONS,
    BREAKER_STATES,
    MAX_REASONS,
    FamilyCollector,
    MetricsPage,
    NodeMetrics,
    RankMetrics,
    outcome_of,
)
from transfer.metrics.links import LINK_WINDOW_S
from transfer.metrics.specs import STAGE_BUCKETS_S, TURN_BUCKETS_S
from transfer.ring import Grant, StagingAllocator
from transfer.storage.base import Outcome

STATUS = {
    "rank": 1, "pid": 99, "pool_pages": 100, "pool_pages_reserved": 10, "pool_pages_bound": 30, "ring_capacity": 4096,
    "ring_live_bytes": 512, "ring_peak_bytes": 1024, "ring_quarantined_bytes": 256, "ring_live_grants": 2,
    "watermark_position": 7777, "requests": 3, "sessions": 4, "watermark_acks": 5, "dropped_messages": 0,
    "refused_connections": 2, "ending_sessions": 6,
    "pending_transfers": 8, "open_files": 9, "threads": 10, "resident_bytes": 11, "idle_checks": 12,
    "pools": [
        {"group": "full", "pages": 90, "reserved": 8, "bound": 22},
        {"group": "window_64", "pages": 10, "reserved": 2, "bound": 8},
    ],
}  # fmt: skip


@dataclass
class Stats:
    writes: int = 4
    writes_without_staging: int = 1000
    resends: int = 1
    transfer_s: float = 0.02
    exposed_s: float = 0.005


def samples(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of an exposition text; a sample that is there twice is an error."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(page: bytes, name: str, **labels: str) -> float:
    return samples(page)[f"kvferry_{name}", frozenset(labels.items())]


def check(page: bytes, labels: dict[str, str], **expected: float) -> None:
    """The page has these numbers under these labels."""
    found = samples(page)
    assert {name: found[f"kvferry_{name}", frozenset(labels.items())] for name in expected} == expected


def page_of(*ranks: RankMetrics, role: str = "decode", **status: int) -> bytes:
    """The leader's page, after the snapshots have travelled as they do between processes."""
    return rendered(NodeMetrics(role=role), *(as_sent(rank, **status) for rank in ranks))


def as_sent(rank: RankMetrics, **status: int) -> dict[str, Any]:
    """Return a rank's snapshot, encoded and decoded as between processes."""
    snapshot: dict[str, Any] = msgpack.unpackb(msgpack.packb(rank.snapshot({**STATUS, **status})))
    return snapshot


def rendered(node: NodeMetrics, *snapshots: dict[str, Any] | None) -> bytes:
    """Return the leader's page as text."""
    return MetricsPage().render(node.collect(snapshots))[0]


def link(
    prefill_rank: int = 0, decode_rank: int = 0, lane: str = "ucx/net", latency_s: float = 0.0, bandwidth: float = 100.0
) -> Link:
    """Return a link as the probe measured it; `bandwidth` in bytes a second."""
    return Link(
        prefill_rank=prefill_rank, decode_rank=decode_rank, lane=lane, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth
    )


def test_what_a_prefill_rank_counts_is_on_the_page() -> None:
    rank = RankMetrics(role="prefill", rank=2)
    rank.histogram("stage_seconds", stage="credit_wait").observe(0.001)
    rank.gather_finished(0.0001)
    rank.gather_finished(0.0003)
    rank.write_finished(0.004, 1 << 20)
    rank.write_finished(0.004, 1 << 10)
    rank.histogram("stage_seconds", stage="ack").observe(0.002)
    rank.request_sent(Stats())
    rank.message_dropped("unknown_chunk")
    page = page_of(rank, role="prefill")
    mine = {"role": "prefill", "rank": "2"}
    moved = {"transferred_bytes_total": (1 << 20) + (1 << 10), "writes_avoided_total": 996}
    check(page, mine, chunks_total=2, writes_total=2, resends_total=1, **moved)
    check(page, mine | {"reason": "unknown_chunk"}, dropped_messages_total=1)
    for stage, count, total in (("credit_wait", 1, 0.001), ("gather", 2, 0.0004), ("write", 2, 0.008), ("ack", 1, 0.002)):
        assert value(page, "stage_seconds_count", stage=stage, **mine) == count
        assert math.isclose(value(page, "stage_seconds_sum", stage=stage, **mine), total)
    assert value(page, "stage_seconds_count", stage="total", **mine) == 1


def test_what_a_decode_rank_counts_is_on_the_page() -> None:
    rank = RankMetrics(role="decode", rank=0)
    rank.scatter_finished(0.01, 4096)
    rank.counter("broken_chunks").inc()
    page = page_of(rank)
    mine = {"role": "decode", "rank": "0"}
    check(page, mine, chunks_total=1, transferred_bytes_total=4096, broken_chunks_total=1)
    check(page, mine | {"stage": "scatter"}, stage_seconds_count=1)


def test_the_status_becomes_gauges() -> None:
    page = page_of(RankMetrics(role="decode", rank=1))
    mine = {"role": "decode", "rank": "1"}
    same = "ring_live_bytes ring_peak_bytes ring_quarantined_bytes ring_live_grants sessions ending_sessions pending_transfers"
    prefixed = {f"rank_{name}": STATUS[name] for name in ("requests", "open_files", "threads", "resident_bytes", "idle_checks")}
    check(page, mine, **{name: STATUS[name] for name in same.split()}, **prefixed)  # type: ignore[arg-type]
    check(page, mine, ring_capacity_bytes=4096, ring_watermark_position_bytes=7777)
    for state, full, window in (("free", 60, 0), ("reserved", 8, 2), ("bound", 22, 8)):
        assert value(page, "pool_pages", group="full", state=state, **mine) == full
        assert value(page, "pool_pages", group="window_64", state=state, **mine) == window
    assert ("kvferry_staging_slots", frozenset({*mine.items(), ("state", "used")})) not in samples(page)
    page = page_of(RankMetrics(role="prefill", rank=1), role="prefill", staging_slots=4, staging_slots_used=1)
    assert value(page, "staging_slots", role="prefill", rank="1", state="used") == 1
    assert value(page, "staging_slots", role="prefill", rank="1", state="free") == 3


def test_totals_of_the_status_are_counted_once_and_never_back() -> None:
    rank = RankMetrics(role="decode", rank=0)
    for total, expected in ((3, 3), (3, 3), (7, 7), (1, 7), (8, 8)):
        rank.strangers_dropped(total)
        page = page_of(rank, refused_connections=2 * total, watermark_acks=3 * total)
        mine = {"role": "decode", "rank": "0"}
        check(page, mine | {"reason": "stranger"}, dropped_messages_total=expected)
        check(page, mine, refused_connections_total=2 * expected, watermark_acks_total=3 * expected)


def test_ranks_stand_side_by_side() -> None:
    ranks = [RankMetrics(role="decode", rank=rank) for rank in range(3)]
    for count, rank in enumerate(ranks):
        for _ in range(count):
            rank.scatter_finished(0.003, 100)
        rank.scatter_finished(1000.0, 100)
    page = page_of(*reversed(ranks))
    for count in range(3):
        mine = {"role": "decode", "rank": str(count), "stage": "scatter"}
        assert value(page, "stage_seconds_count", **mine) == value(page, "stage_seconds_bucket", le="+Inf", **mine) == count + 1
        assert value(page, "stage_seconds_bucket", le="0.005", **mine) == count
    assert page.count(b"# TYPE kvferry_stage_seconds histogram") == 1


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_link_is_busy_once_however_many_writes_are_under_way() -> None:
    clock = Clock()
    rank = RankMetrics(role="prefill", rank=3, clock=clock)
    rank.link_write_began(7)  # not measured yet: of the probe's own session
    rank.link_measured(7, link(3, 1, latency_s=0.5))
    rank.link_write_ended(7, 1000)
    mine = {"role": "prefill", "rank": "3", "prefill_rank": "3", "decode_rank": "1", "lane": "ucx/net"}

    def shown() -> list[float]:
        page = page_of(rank, role="prefill")
        return [value(page, f"link_{name}_total", **mine) for name in ("written_bytes", "busy_seconds", "probe_seconds")]

    assert shown() == [0, 0, 0]
    rank.link_write_began(7)
    clock.now_s += 2
    rank.link_write_began(7)
    clock.now_s += 3
    rank.link_write_ended(7, 200)  # 0.5 s and 2 s by the probe
    assert shown() == [200, 5, 2.5], "another one is still under way, and the link was busy until now"
    clock.now_s += 1
    rank.link_write_ended(7, 0)  # it failed
    assert shown() == [200, 6, 2.5]
    clock.now_s += 10
    rank.link_written(7, clock.now_s - 4, clock.now_s, 100)  # stored by a kernel that nothing overlapped
    assert shown() == [300, 10, 4.0]
    clock.now_s += 10
    for begun_s in (clock.now_s - 9, clock.now_s - 6, clock.now_s - 3):  # three that are recorded at once, later
        rank.link_written(7, begun_s, begun_s + 2, 100)
    assert shown() == [600, 16, 8.5]
    rank.link_write_began(7)
    rank.link_closed(7)
    rank.link_write_ended(7, 100)
    assert b"kvferry_link_" not in page_of(rank, role="prefill")


def link_counters(rank: RankMetrics) -> tuple[float, float, float]:
    """Bytes, busy seconds and probe seconds of the links of prefill rank 0 to decode ranks 0."""
    page = page_of(rank, role="prefill")
    mine = {"role": "prefill", "rank": "0", "prefill_rank": "0", "decode_rank": "0", "lane": "ucx/net"}
    written, busy, probe = (
        value(page, f"link_{name}_total", **mine) for name in ("written_bytes", "busy_seconds", "probe_seconds")
    )
    return written, busy, probe


def test_links_with_the_same_labels_are_busy_once() -> None:
    """Six decode nodes of one rank share the labels: a card that they use fully is busy one second in a second."""
    clock, sessions = Clock(), range(6)
    rank = RankMetrics(role="prefill", rank=0, clock=clock)
    for session in sessions:
        rank.link_measured(session, link())
        rank.link_write_began(session)
    clock.now_s += 6
    assert link_counters(rank) == (0, 6, 0)
    for session in sessions:
        rank.link_write_ended(session, 100)
    assert link_counters(rank) == (600, 6, 6), "together they are as fast as the probe"
    assert {(use.num_bytes, use.busy_s, use.probe_s) for use in map(rank.link_use, sessions)} == {(100, 6, 1)}
    clock.now_s += 10
    rank.link_written(0, clock.now_s - 4, clock.now_s, 100)
    clock.now_s += 1
    rank.link_written(1, clock.now_s - 3, clock.now_s, 100)  # of which two seconds are the other's, too
    assert link_counters(rank)[1] == 6 + 5
    assert (rank.link_use(0).busy_s, rank.link_use(1).busy_s) == (10, 9)


@dataclass
class Ring:
    head: int = 0
    position: int = 0
    oldest_open: int | None = None


def test_a_watermark_stalls_only_while_grants_are_live() -> None:
    clock, ring = Clock(), Ring(head=4096, position=4096)
    rank = RankMetrics(role="decode", rank=0, clock=clock)
    rank.watch_ring(ring)

    def shown(*, after_s: float) -> tuple[float, float]:
        clock.now_s += after_s
        page = page_of(rank)
        lag, stalled = (
            value(page, f"ring_watermark_{name}", role="decode", rank="0") for name in ("lag_bytes", "stalled_seconds")
        )
        return lag, stalled

    assert shown(after_s=50) == (0, 0)
    ring.head, ring.oldest_open = 8192, 4096
    assert shown(after_s=50) == (4096, 0), "it was idle until now"
    assert shown(after_s=20) == (4096, 20)
    ring.head = 16384  # more is granted, and released above the watermark
    assert shown(after_s=5) == (12288, 25)
    ring.position = ring.oldest_open = 8192
    assert shown(after_s=5) == (8192, 0)
    assert shown(after_s=3) == (8192, 3)
    ring.position, ring.oldest_open = 16384, None
    assert shown(after_s=3) == (0, 0)


def test_a_grant_in_quarantine_around_which_others_go_is_no_stall_and_a_stuck_one_beside_it_is() -> None:
    clock, ring = Clock(), StagingAllocator(1 << 20)
    rank = RankMetrics(role="decode", rank=0, clock=clock)
    rank.watch_ring(ring)

    def stalled() -> float:
        clock.now_s += 1
        return value(page_of(rank), "ring_watermark_stalled_seconds", role="decode", rank="0")

    ring.quarantine(ring.assign(4096))
    live: deque[Grant] = deque()
    shown = []
    for _ in range(50):
        live.extend(ring.assign(65536) for _ in range(4))
        while len(live) > 4:
            ring.release(live.popleft())
        shown.append(stalled())
    assert ring.position == 0 and max(shown) <= 1
    clock.now_s += 88  # and now nobody writes
    assert [stalled(), stalled()] == [89, 90]
    while live:
        ring.release(live.popleft())
    assert stalled() == 0, "what is in quarantine is told by itself"


def test_one_slow_link_of_many_with_the_same_labels_is_seen_and_named_once() -> None:
    """Of 18 decode nodes: their links are one series, in which a slow one is lost."""
    clock = Clock()
    rank = RankMetrics(role="prefill", rank=0, clock=clock)
    for node in range(18):
        rank.link_measured(node, link(bandwidth=1e9), f"decode-{node}:7001")

    def shown(*, slow_s: float) -> tuple[float, float]:
        """After five minutes in which each link writes 0.1 GB a second; one of them takes so long for it."""
        for _ in range(30):
            clock.now_s += 10
            for node in range(18):
                rank.link_written(node, clock.now_s - 10 * (slow_s if node == 7 else 0.11), clock.now_s, 10**9)
            page = page_of(rank, role="prefill")
        return tuple(value(page, f"{name}_link_ratio", role="prefill", rank="0") for name in ("slowest", "fastest"))  # type: ignore[return-value]

    with capture_logs() as lines:
        slowest, fastest = shown(slow_s=1.0)
        assert slowest == pytest.approx(0.1, rel=0.01) and fastest == pytest.approx(0.91, rel=0.01)
        slowest, _ = shown(slow_s=0.4)  # a little above the bound: no end of it, and so no news when it is below again
        assert slowest == pytest.approx(0.25, rel=0.01)
        shown(slow_s=1.0)
        assert shown(slow_s=0.11)[0] == -1, "none is in use so much"
        shown(slow_s=1.0)
    named = [(line["event"], line["peer"], line["decode_rank"], line["lane"]) for line in lines]
    assert named == [("link_slow", "decode-7:7001", 0, "ucx/net")] * 2, "once for each time that it is slow"


def test_links_that_fill_one_card_are_not_slow_and_a_new_link_is_nothing_yet() -> None:
    clock = Clock()
    rank = RankMetrics(role="prefill", rank=0, clock=clock)
    for node in range(10):
        rank.link_measured(node, link(bandwidth=1e9), f"decode-{node}:7001")
    ratios = []
    with capture_logs() as lines:
        for second in range(0, 200, 10):
            clock.now_s += 10
            for node in range(10):
                rank.link_written(node, clock.now_s - 10.0, clock.now_s, 10**9)
            ratios.append(value(page_of(rank, role="prefill"), "slowest_link_ratio", role="prefill", rank="0"))
            assert (ratios[-1] == -1) is (second < LINK_WINDOW_S)
    assert ratios[-1] == pytest.approx(0.1) and not lines


def test_links_that_fell_back_count_while_they_are_open() -> None:
    rank = RankMetrics(role="decode", rank=0)
    for session in (1, 2):
        rank.link_fell_back(session)
        rank.link_measured(session, link())
    assert value(page_of(rank), "links_fallen_back", role="decode", rank="0") == 2
    for session in (1, 1, 3):
        rank.link_closed(session)
    assert value(page_of(rank), "links_fallen_back", role="decode", rank="0") == 1


def test_overlap_is_what_was_not_exposed_and_only_of_ranks_that_sent() -> None:
    rank = RankMetrics(role="prefill", rank=0)
    rank.request_sent(Stats())
    rank.request_sent(Stats(writes=0, writes_without_staging=0, resends=0, transfer_s=0.0, exposed_s=0.0))
    page = page_of(rank, role="prefill")
    assert value(page, "overlap_ratio_count", role="prefill", rank="0") == 1
    assert math.isclose(value(page, "overlap_ratio_sum", role="prefill", rank="0"), 0.75)
    assert math.isclose(value(page, "stage_seconds_sum", stage="exposed", role="prefill", rank="0"), 0.005)
    assert value(page, "stage_seconds_count", stage="total", role="prefill", rank="0") == 1


@pytest.mark.parametrize(
    ("error", "reason", "outcome"),
    [
        (TransferAborted("the client went away"), "caller", "aborted"),
        (TransferAborted("enough", is_by_operator=True), "operator", "aborted"),
        (ResourceExhausted("no room within 9 s"), None, "refused"),
        (PeerUnreachable("gone"), "lost", "failed"),
        (EngineError("broke"), "engine", "failed"),
        (IntegrityError("twice"), "data_loss", "failed"),
        (RemoteProtocolError("?"), "misfit", None),
        (TransferError("new"), "other", None),
    ],
)
def test_an_end_has_one_reason_and_one_outcome(error: TransferError, reason: str | None, outcome: str | None) -> None:
    assert outcome is None or outcome_of(error) == outcome
    node = NodeMetrics(role="prefill")
    node.request_given_up(error)
    found = [one for one in ABORT_REASONS if value(rendered(node), "aborts_total", role="prefill", reason=one)]
    assert reason is None or found == [reason]


def latencies(rank: RankMetrics) -> dict[tuple[str, str], float]:
    """Of each link, by prefill rank and lane."""
    found = [
        (dict(labels), number) for (name, labels), number in samples(page_of(rank)).items() if name.endswith("latency_seconds")
    ]
    assert all(labels["decode_rank"] == labels["rank"] for labels, _ in found)
    return {(labels["prefill_rank"], labels["lane"]): number for labels, number in found}


def test_a_link_is_shown_for_as_long_as_a_session_has_it() -> None:
    rank = RankMetrics(role="decode", rank=0)
    for session, prefill_rank in ((1, 0), (2, 1), (3, 0)):  # 1 and 3: rank 0 of two prefill instances
        rank.link_measured(session, link(prefill_rank, latency_s=session))
    assert latencies(rank) == {("0", "ucx/net"): 3.0, ("1", "ucx/net"): 2.0}
    rank.link_closed(3)
    assert latencies(rank) == {("0", "ucx/net"): 1.0, ("1", "ucx/net"): 2.0}
    rank.link_closed(2)
    rank.link_closed(2)
    assert latencies(rank) == {("0", "ucx/net"): 1.0}
    rank.link_closed(1)
    assert b"kvferry_link_" not in page_of(rank)
    for lane, latency_s in (("ucx/net", 4), ("ucx/shm", 5), ("ucx/shm", 6)):
        rank.link_measured(4, link(lane=lane, latency_s=latency_s))
    assert latencies(rank) == {("0", "ucx/shm"): 6.0}, "one series, with the newest values"


def test_labels_are_bounded_whatever_a_peer_sends() -> None:
    rank = RankMetrics(role="decode", rank=0)
    for number in range(100):
        rank.message_dropped(f"reason_{number}")
    rank.message_dropped("request 7f3a was not expected")
    rank.message_dropped("x" * 100)
    found = {dict(labels)["reason"]: number for (name, labels), number in samples(page_of(rank)).items() if "dropped" in name}
    assert len(found) == MAX_REASONS + 1
    assert found["other"] == 100 - MAX_REASONS + 2
    assert sum(found.values()) == 102


def test_the_leaders_own_series() -> None:
    node = NodeMetrics(role="decode")
    node.request_ended("done")
    node.request_ended("failed")
    node.histogram("queue_seconds").observe(0.1)
    node.histogram("time_to_first_token_seconds").observe(0.2)
    node.histogram("time_per_output_token_seconds").observe(0.01)
    node.node_state(state="ready", queued=2, running=3, peers={"joined": 1, "lost": 2}, restarts=1)
    assert b"kvferry_max_" not in rendered(node, None).replace(b"# ", b""), "a side that an engine hosts has no such limit"
    node.limits(max_queued=256, max_running=32)
    page = rendered(node, None)
    mine = {"role": "decode"}
    check(page, mine, max_queued_requests=256, max_running_requests=32, queued_requests=2, running_requests=3, rank_restarts=1)
    check(page, mine, queue_seconds_count=1, time_to_first_token_seconds_count=1, time_per_output_token_seconds_count=1)
    for outcome, number in {"done": 1, "failed": 1, "aborted": 0}.items():
        check(page, mine | {"outcome": outcome}, requests_total=number)
    for state, number in {"joined": 1, "lost": 2, "joining": 0}.items():
        check(page, mine | {"state": state}, peers=number)
    for state, number in {"ready": 1, "starting": 0}.items():
        check(page, mine | {"state": state}, node_state=number)
    build = next(labels for name, labels in samples(page) if name == "kvferry_build_info")
    assert dict(build)["version"] == transfer.__version__


def test_retries_and_breakers_are_a_decode_nodes() -> None:
    node = NodeMetrics(role="decode")
    page = rendered(node)
    assert value(page, "retries_total", role="decode") == value(page, "breaker_openings_total", role="decode") == 0
    assert value(page, "breakers", role="decode", state="half-open") == 0
    node.counter("retries").inc()
    for _ in range(2):
        node.counter("breaker_openings").inc()
    node.breakers({"open": 2, "closed": 1})
    node.breakers({"closed": 3})
    page = rendered(node)
    assert (value(page, "retries_total", role="decode"), value(page, "breaker_openings_total", role="decode")) == (1, 2)
    assert [value(page, "breakers", role="decode", state=state) for state in BREAKER_STATES] == [3, 0, 0]
    assert b"kvferry_retries_total{" not in rendered(NodeMetrics(role="prefill"))


def test_a_snapshot_of_another_build_is_taken_as_far_as_it_is_known() -> None:
    snapshot = as_sent(RankMetrics(role="decode", rank=0))
    families = snapshot["families"]
    families["kvferry_unheard_of"] = [[], [1.0]]
    families["kvferry_step_seconds"][1].pop()  # a bucket less
    del families["kvferry_sessions"]
    page = rendered(NodeMetrics(role="decode"), snapshot, None)
    assert b"unheard" not in page and b"kvferry_sessions" not in page and b"kvferry_step_seconds" not in page
    assert b"kvferry_ring_live_bytes{" in page


OPEN_METRICS = "application/openmetrics-text; version=1.0.0"


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_a_page_equals_the_clients_output_for_the_same_numbers_and_series(accept: str) -> None:
    """Compare the page with the client's output. The page replaces numbers in lines that the client wrote before."""
    page, node, ranks = MetricsPage(), NodeMetrics(role="decode"), [RankMetrics(role="decode", rank=rank) for rank in range(2)]
    encoder, content_type = choose_encoder(accept)

    def compare() -> None:
        families = node.collect([as_sent(rank) for rank in ranks])
        registry = CollectorRegistry()
        registry.register(FamilyCollector(families))
        assert page.render(families, accept) == (encoder(registry), content_type)

    compare()
    ranks[0].scatter_finished(1234.5678, 10**15)
    ranks[0].scatter_finished(1e-7, 0)
    node.gauge("largest_piece_bytes").set(12345678)
    compare()
    ranks[1].message_dropped("unknown_chunk")
    ranks[0].link_measured(1, link())
    node.counter("refused_calls", method='a\\b "c"\nd{e="f"} NaN\n').inc()
    compare()
    ranks[0].link_closed(1)
    node.gauge("largest_piece_bytes").set(math.nan)
    compare()
    ranks.pop()
    compare()


def test_open_metrics_has_the_samples_of_the_text_and_no_creation_times() -> None:
    rank, node, page = RankMetrics(role="prefill", rank=0), NodeMetrics(role="prefill"), MetricsPage()
    rank.request_sent(Stats())
    families = node.collect([rank.snapshot(STATUS)])
    text, open_metrics = page.render(families)[0], page.render(families, OPEN_METRICS)[0].decode()
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in open_metrics_families(open_metrics)
        for sample in family.samples
    }
    assert found == samples(text)
    assert not [name for name, _ in found if name.endswith("_created")]


@pytest.mark.parametrize(
    ("accept", "ends_with"),
    [
        ("text/plain; version=x", b"\n"),
        ("text/plain; version=1.0.0", b"\n"),
        (f"{OPEN_METRICS}x", b"\n"),
        ("application/openmetrics-text; version=1.x", b"\n"),
        (";=,,", b"\n"),
        *((f"application/openmetrics-text; version={number}.0.0", b"# EOF\n") for number in range(2, 6)),
    ],
)
def test_any_accept_header_gets_one_of_two_formats(accept: str, ends_with: bytes) -> None:
    """A page keeps the lines of each format, so a client that names any version must not add formats."""
    page, families = MetricsPage(), NodeMetrics(role="prefill").collect([])
    text, content_type = page.render(families, accept)
    assert text.startswith(b"# HELP ") and text.endswith(ends_with)
    known = OPEN_METRICS if ends_with == b"# EOF\n" else ""
    assert (text, content_type) == page.render(families, known)


def test_a_page_of_prometheus_own_client_reads_the_same() -> None:
    """The text is what the client makes of the same observations."""
    registry = CollectorRegistry()
    theirs = Histogram("kvferry_queue_seconds", "h", ("role",), registry=registry, buckets=STAGE_BUCKETS_S).labels(role="decode")
    ours = NodeMetrics(role="decode")
    for seconds in (0.0, 2e-5, 2.1e-5, 0.5, 59.9, 60.0, 1e9, 1e-9):
        theirs.observe(seconds)
        ours.histogram("queue_seconds").observe(seconds)
    wanted = samples(b"\n".join(line for line in generate_latest(registry).splitlines() if b"_created" not in line) + b"\n")
    found = samples(rendered(ours))
    assert {key: number for key, number in found.items() if key[0].startswith("kvferry_queue_seconds")} == wanted


def test_what_rank_and_leader_see_of_the_store_is_on_one_page() -> None:
    rank, node = RankMetrics(role="prefill", rank=1), NodeMetrics(role="prefill")
    shown = samples(rendered(node, rank.snapshot({})))
    assert not [name for name, _ in shown if "_store_" in name], "nothing of a store where there is none"
    rank.store.operation_finished("get", [Outcome.OK, Outcome.OK, Outcome.CORRUPT], num_bytes=4096, seconds=0.02)
    rank.store.queue_changed(3)
    rank.store.circuits_changed(read="closed", write="open")
    node.store.operation_finished("exists", [Outcome.TIMEOUT], num_bytes=0, seconds=2.0)
    page = rendered(node, as_sent(rank))
    mine = {"role": "prefill", "rank": "1"}
    check(page, mine | {"op": "get", "outcome": "ok"}, store_operations_total=2)
    check(page, mine | {"op": "get", "outcome": "corrupt"}, store_operations_total=1)
    check(page, {"role": "prefill", "op": "exists", "outcome": "timeout"}, store_operations_total=1)
    check(page, mine | {"op": "get"}, store_bytes_total=4096, store_seconds_count=1)
    check(page, mine, store_queue_depth=3)
    assert [value(page, "store_circuit", direction="write", state=state, **mine) for state in BREAKER_STATES] == [0, 1, 0]
    assert value(page, "store_circuit", direction="read", state="closed", **mine) == 1
    assert page.count(b"# HELP kvferry_store_seconds ") == 1


@dataclass
class Turns:
    """Turns as a loop has counted them: `counts` by the buckets of the metric."""

    counts: list[int]
    total_s: float


def test_turns_of_ranks_and_leader_are_on_one_page() -> None:
    rank, node = RankMetrics(role="decode", rank=1), NodeMetrics(role="decode")
    shown = samples(rendered(node, rank.snapshot({})))
    assert not [name for name, _ in shown if "_loop_turn_" in name], "nothing without a measured loop"
    num_buckets = len(TURN_BUCKETS_S)
    of_rank = Turns([5, *[0] * (num_buckets - 1), 2], 30.5)
    rank.histogram("loop_turn_seconds").follow(of_rank)
    node.histogram("loop_turn_seconds").follow(Turns([7, *[0] * num_buckets], 0.001))
    of_rank.counts[0] += 1
    page = rendered(node, as_sent(rank))
    mine = {"role": "decode", "rank": "1"}
    for bound in ("0.001", "10.0"):
        check(page, mine | {"le": bound}, loop_turn_seconds_bucket=6)
    check(page, mine, loop_turn_seconds_count=8, loop_turn_seconds_sum=30.5)
    check(page, {"role": "decode"}, loop_turn_seconds_count=7)
