"""What is seen of a cluster at one moment, put together from what each node says of itself: nodes, links, requests, alerts.

Pure: it asks nobody, and knows no terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from transfer.pb import kvferry_pb2 as pb

SLOW_SHARE: Final = 0.5
"""A link that is busy and slower than this share of its probe."""
SLOW_LOOKS: Final = 3
"""In so many looks one after the other; a busy machine makes any link slow for a moment."""
SILENT_LOOKS: Final = 2
"""In so many looks one after the other without an answer."""
STALLED_S: Final = 5.0
"""A watermark that stands for so long while grants are live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One node, as it was when it was asked.

    Args:
        address: host:port of its gRPC API.
        status: None: it did not answer.
        requests: In flight there.
        error: Why it did not answer.
        at_s: Monotonic seconds of the answer.
        late_s: For so long it has been waited for in vain; what it said before is shown until it answers, or its time is over.
        late_looks: In so many looks one after the other.
    """

    address: str
    status: pb.NodeStatus | None = None
    requests: tuple[pb.RequestStatus, ...] = ()
    error: str = ""
    at_s: float = 0.0
    late_s: float = 0.0
    late_looks: int = 0

    @property
    def sides(self) -> tuple[Seen, ...]:
        """Return one node for each side of an engine's instance that has both."""
        if self.status is None or not self.status.HasField("other_side"):
            return (self,)
        return tuple(
            replace(self, status=status, requests=tuple(one for one in self.requests if one.role == status.role))
            for status in (self.status, self.status.other_side)
        )

    @property
    def key(self) -> str:
        """Name the node, or one side of it, among all that are seen."""
        return f"{self.address} {self.role}"

    @property
    def role(self) -> str:
        return "" if self.status is None else self.status.role

    @property
    def incarnation(self) -> int:
        return 0 if self.status is None else self.status.instance.incarnation

    @property
    def state(self) -> str:
        """In one word, or two."""
        if self.status is None:
            return "unreachable"
        return "not ready" if self.status.state == "ready" and not self.status.ready else self.status.state

    @property
    def reason(self) -> str:
        return self.error if self.status is None else self.status.not_ready_reason

    @property
    def is_silent(self) -> bool:
        """It does not answer at the moment; one that is only slow is late in one look, and has answered in the next."""
        return self.late_s > 0 and (self.status is None or self.late_looks >= SILENT_LOOKS)

    @property
    def shown_state(self) -> str:
        """`state`, or that it does not answer at the moment."""
        return "silent" if self.is_silent else self.state

    @property
    def shown_reason(self) -> str:
        if not self.late_s:
            return self.reason
        return f"no answer for {self.late_s:.1f} s" + ("" if self.status is None else f"; it was {self.state} before")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A link between two ranks.

    Args:
        prefill, decode: Addresses of the two nodes.
        status: As measured at attach.
        now_bytes_per_s: What it moved while it was busy, between this look and the one before; None: not known; 0: idle.
        share: Of the speed of its probe, for writes of the same sizes; None: not known, or idle.
    """

    prefill: str
    decode: str
    status: pb.LinkStatus
    now_bytes_per_s: float | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """A request as both nodes see it, joined by the name of its transfer.

    Args:
        decode, prefill: Addresses; empty where that node does not speak of it.
        at_decode, at_prefill: What each says.
        num_ranks: Decode ranks, or where no decode node speaks of it, prefill ranks.
    """

    decode: str = ""
    prefill: str = ""
    at_decode: pb.RequestStatus | None = None
    at_prefill: pb.RequestStatus | None = None
    num_ranks: int = 0

    @property
    def one(self) -> pb.RequestStatus:
        found = self.at_decode if self.at_decode is not None else self.at_prefill
        assert found is not None
        return found

    @property
    def key(self) -> str:
        return f"{self.decode or self.prefill} {self.one.request_id}"

    @property
    def stage(self) -> str:
        """What it is at: of a request that waits for prefill, what prefill is at."""
        if self.at_decode is None or (self.at_decode.stage == "queued" and self.at_prefill is not None):
            return self.at_prefill.stage if self.at_prefill is not None else "queued"
        return self.at_decode.stage

    @property
    def computed(self) -> tuple[int, int]:
        """Tokens whose KV is there, of the prompt's: on the prefill node, and once that has forgotten the request all of them."""
        total = self.one.prompt_tokens
        if self.at_prefill is not None:
            return self.at_prefill.ready_tokens, total
        is_past = self.stage in ("generating", "ending")
        return (total if is_past else self.one.ready_tokens), total

    @property
    def moved(self) -> tuple[int, int]:
        """Ranks whose part of the transfer is complete."""
        return (self.num_ranks if self.stage == "generating" else min(self.one.ranks_done, self.num_ranks)), self.num_ranks

    @property
    def generated(self) -> tuple[int, int]:
        return self.one.generated_tokens, self.one.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All of it, at one moment."""

    nodes: tuple[Seen, ...]
    links: tuple[LinkView, ...] = ()
    requests: tuple[RequestRow, ...] = ()

    def tier(self, role: str) -> list[Seen]:
        return [node for node in self.nodes if node.role == role]


def view_of(nodes: Sequence[Seen], before: Mapping[str, Seen] | None = None) -> ClusterView:
    """Puts together what nodes say.

    Args:
        nodes: As they are shown.
        before: The answer before that which is shown, by address: what has moved since tells how fast links are.
    """
    sides = [side for node in nodes for side in node.sides]
    earlier = {side.key: side for node in (before or {}).values() for side in node.sides}
    return ClusterView(nodes=tuple(sides), links=tuple(_links(sides, earlier)), requests=tuple(_requests(sides)))


def _links(nodes: Sequence[Seen], before: Mapping[str, Seen]) -> Iterable[LinkView]:
    """As the decode nodes name them; what prefill nodes name besides is to nodes that are not seen."""
    by_life = {node.incarnation: node.address for node in nodes if node.incarnation}
    uses = _uses(nodes, before)
    seen: set[tuple[int, int, int, int]] = set()
    for node in sorted(nodes, key=lambda one: one.role != "decode"):
        if node.status is None:
            continue
        named = {peer.incarnation: peer.address for peer in node.status.peers}
        for link in node.status.links:
            other = by_life.get(link.peer_incarnation) or named.get(link.peer_incarnation) or "?"
            is_decode = node.role == "decode"
            lives = (link.peer_incarnation, node.incarnation) if is_decode else (node.incarnation, link.peer_incarnation)
            key = (lives[0], link.prefill_rank, lives[1], link.decode_rank)
            if key in seen:
                continue
            seen.add(key)
            prefill, decode = (other, node.address) if is_decode else (node.address, other)
            now, share = uses.get(key, (None, None))
            yield LinkView(prefill=prefill, decode=decode, status=link, now_bytes_per_s=now, share=share)


_Key = tuple[int, int, int, int]
"""Of a link: life and rank of the prefill side, and of the decode side."""


def _uses(nodes: Sequence[Seen], before: Mapping[str, Seen]) -> dict[_Key, tuple[float, float | None]]:
    """Bytes a second while busy and share of the probe's speed, of links of which two looks are known; 0 and None: idle."""
    found: dict[_Key, tuple[float, float | None]] = {}
    for node in nodes:
        earlier = before.get(node.key)
        if node.status is None or earlier is None or earlier.incarnation != node.incarnation:
            continue
        was = dict(_use_counts(earlier))
        for key, use in _use_counts(node):
            former = was.get(key, use)
            moved, busy_s = use.written_bytes - former.written_bytes, use.busy_s - former.busy_s
            is_used = moved > 0 and busy_s > 0
            found[key] = (moved / busy_s, (use.probe_s - former.probe_s) / busy_s) if is_used else (0.0, None)
    return found


def _use_counts(node: Seen) -> Iterable[tuple[_Key, pb.LinkUse]]:
    if node.status is None:
        return
    for rank in node.status.ranks:
        for use in rank.link_uses:
            yield (node.incarnation, rank.rank, use.peer_incarnation, use.decode_rank), use


def _requests(nodes: Sequence[Seen]) -> Iterable[RequestRow]:
    at_prefill = {request.transfer_id: (node, request) for node in nodes if node.role == "prefill" for request in node.requests}
    for node in nodes:
        if node.role != "decode" or node.status is None:
            continue
        for request in node.requests:
            other, same = at_prefill.pop(request.transfer_id, (None, None))
            yield RequestRow(
                decode=node.address,
                prefill=other.address if other is not None else request.peer,
                at_decode=request,
                at_prefill=same,
                num_ranks=len(node.status.ranks),
            )
    for node, request in at_prefill.values():
        ranks = len(node.status.ranks) if node.status is not None else 0
        yield RequestRow(decode=request.peer, prefill=node.address, at_prefill=request, num_ranks=ranks)


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
    """Finds what is wrong in view after view; owned by whoever looks."""

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
        slow = {_name(link): link.share for link in view.links if link.share is not None and link.share < SLOW_SHARE}
        late = {node.address for node in view.nodes if node.late_s}  # what it says of its links was counted before
        again = {_name(link) for link in view.links if link.prefill in late}
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


def _name(link: LinkView) -> str:
    return f"{link.prefill} #{link.status.prefill_rank} -> {link.decode} #{link.status.decode_rank}"
