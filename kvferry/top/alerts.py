"""Warnings of `kvferry top`: the problems in a view of a cluster, and the time of their start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from node_runtime.cluster_view import SLOW_SHARE, ClusterView, Seen
from transfer.pb import kvferry_pb2 as pb

SLOW_LOOKS: Final = 3
"""Looks in a row in which a link must be slow before it is an alert. A busy machine makes any link slow for a moment."""
STALLED_S: Final = 5.0
"""A watermark that stands for so long while grants are live."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Alert:
    """Something that an operator should know.

    Args:
        what: Names it, the same as long as it lasts.
        text: For people.
        is_bad: Red rather than yellow.
    """

    what: str
    text: str = field(compare=False)
    is_bad: bool = field(default=False, compare=False)


class Alerts:
    """Find faults in successive views of a cluster. One caller owns it."""

    def __init__(self) -> None:
        self._oldest: dict[tuple[str, int], tuple[int, float]] = {}  # of each ring's open grants, and since when it is
        self._slow: dict[str, int] = {}  # looks in a row
        self.now: dict[str, Alert] = {}

    def update(self, view: ClusterView) -> tuple[list[Alert], list[Alert]]:
        """What has begun with this view, and what has ended."""
        found = {alert.what: alert for alert in self._find(view)}
        begun = [alert for what, alert in found.items() if what not in self.now]
        ended = [alert for what, alert in self.now.items() if what not in found]
        self.now = found
        return begun, ended

    def _find(self, view: ClusterView) -> Iterable[Alert]:
        for node in view.nodes:
            yield from self._of_node(node)
        slow = {link.name: link.share for link in view.links if link.share is not None and link.share < SLOW_SHARE}
        late = {node.address for node in view.nodes if node.late_s}  # what it says of its links was counted before
        again = {link.name for link in view.links if link.prefill in late}
        self._slow = {which: self._slow.get(which, 0) + (which not in again) for which in slow}
        for which, share in slow.items():
            if self._slow[which] >= SLOW_LOOKS:
                yield Alert(what=f"slow {which}", text=f"link {which} has {share:.2f} of its probe's speed")

    def _of_node(self, node: Seen) -> Iterable[Alert]:
        if node.status is None and node.late_s:
            return  # asked for the first time, a moment ago
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
        if node.role == "decode":  # the other side of an instance has the same address, and no ring
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
    """Where the oldest grant begins that may be written, in a ring; None: there is none, or it cannot be told."""
    if rank.HasField("ring_oldest_open"):
        return rank.ring_oldest_open
    if rank.ring_live_grants and not rank.ring_quarantined_bytes:  # version 0.1: then it is what holds the watermark
        return rank.watermark_position
    return None
