"""Warnings of `kvferry top`: the problems in a view of a cluster, and the time of their start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from node_runtime.cluster_view import SLOW_SHARE, ClusterView, Seen
from transfer.pb import kvferry_pb2 as pb

SLOW_LOOKS: Final = 3
"""Consecutive looks with a slow link before an alert. A busy machine makes any link slow for a moment."""
STALLED_S: Final = 5.0
"""Age of the oldest unwritten grant that raises an alert."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Alert:
    """A problem that an operator should see.

    Args:
        what: Key of the problem; it stays the same as long as the problem lasts.
        is_bad: It is shown in red instead of yellow.
    """

    what: str
    text: str = field(compare=False)
    is_bad: bool = field(default=False, compare=False)


class Alerts:
    """Find problems in successive views of a cluster."""

    def __init__(self) -> None:
        self._oldest: dict[tuple[str, int], tuple[int, float]] = {}  # each ring's oldest open grant, and since when
        self._slow: dict[str, int] = {}  # consecutive looks
        self.now: dict[str, Alert] = {}

    def update(self, view: ClusterView) -> tuple[list[Alert], list[Alert]]:
        """Return the alerts that begin with this view, and those that end."""
        found = {alert.what: alert for alert in self._find(view)}
        begun = [alert for what, alert in found.items() if what not in self.now]
        ended = [alert for what, alert in self.now.items() if what not in found]
        self.now = found
        return begun, ended

    def _find(self, view: ClusterView) -> Iterable[Alert]:
        for node in view.nodes:
            yield from self._of_node(node)
        slow = {link.name: link.share for link in view.links if link.share is not None and link.share < SLOW_SHARE}
        late = {node.address for node in view.nodes if node.late_s}  # their reports of links were already counted
        again = {link.name for link in view.links if link.prefill in late}
        self._slow = {which: self._slow.get(which, 0) + (which not in again) for which in slow}
        for which, share in slow.items():
            if self._slow[which] >= SLOW_LOOKS:
                yield Alert(what=f"slow {which}", text=f"link {which} has {share:.2f} of its probe's speed")

    def _of_node(self, node: Seen) -> Iterable[Alert]:
        if node.status is None and node.late_s:
            return  # the first question is not answered yet
        if node.status is None:
            yield Alert(what=f"unreachable {node.address}", text=node.error or f"{node.address} does not answer", is_bad=True)
            return
        if node.state != "ready":
            reason = f": {node.reason}" if node.reason else ""
            yield Alert(
                what=f"state {node.address}",
                text=f"{node.role} node {node.address} is {node.state}{reason}",
                is_bad=node.state == "failed",
            )
        for peer in node.status.peers:
            if peer.state == "lost":
                yield Alert(
                    what=f"peer {node.address} {peer.address}",
                    text=f"{node.address} has lost {peer.address}: {peer.reason}",
                    is_bad=True,
                )
            if peer.breaker == "open":
                yield Alert(
                    what=f"breaker {node.address} {peer.address}",
                    text=f"{node.address} leaves {peer.address} out: {peer.breaker_reason}",
                )
        if node.role == "decode":  # the other side of an instance has the same address but no ring
            for rank in node.status.ranks:
                yield from self._of_ring(node, rank)

    def _of_ring(self, node: Seen, rank: pb.RankStatus) -> Iterable[Alert]:
        which = f"{node.address} #{rank.rank}"
        if rank.ring_quarantined_bytes:
            text = f"ring of {which}: {rank.ring_quarantined_bytes:,} bytes in quarantine"
            yield Alert(what=f"quarantine {which}", text=text)
        key, oldest = (node.address, rank.rank), _oldest_open(rank)
        if oldest is None:
            self._oldest.pop(key, None)
            return
        before, since_s = self._oldest.get(key, (oldest, node.at_s))
        if before != oldest:
            since_s = node.at_s
        self._oldest[key] = (oldest, since_s)
        if node.at_s - since_s >= STALLED_S:
            text = f"ring of {which}: the grant at {oldest:,} is not written, of {rank.ring_live_grants} live ones"
            yield Alert(what=f"stalled {which}", text=text, is_bad=True)


def _oldest_open(rank: pb.RankStatus) -> int | None:
    """Return the position of the oldest grant that may be written; None if there is none or the node does not report it."""
    if rank.HasField("ring_oldest_open"):
        return rank.ring_oldest_open
    if rank.ring_live_grants and not rank.ring_quarantined_bytes:  # version 0.1: this grant holds the watermark
        return rank.watermark_position
    return None
