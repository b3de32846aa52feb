"""Nodes, links and requests as people see them: the one view model of `kvferry top`, `kvferry status` and the status page.

Pure: it joins the reports of the nodes, makes no calls, and knows neither terminals nor HTML. `view_cells.py` turns its
values into text and bars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # a node whose settings are wrong ends before it has loaded protobuf
    from transfer.pb import kvferry_pb2 as pb

SLOW_SHARE: Final = 0.5
"""A busy link below this share of its probe's speed is slow."""
SILENT_LOOKS: Final = 2
"""Number of looks in a row without an answer after which a node is silent. A slow node answers by the second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One node, at the time of its last answer.

    Args:
        address: host:port of its gRPC API.
        status: Status of the node; None means that it did not answer.
        requests: Requests in flight there.
        error: Why it did not answer.
        at_s: Monotonic seconds of the answer.
        late_s: Seconds since the call, while the answer is outstanding. Until it comes, the last answer is shown.
        late_looks: Looks in a row without an answer.
        peer: Report of the node whose peer it is; None means that no node was asked.
    """

    address: str
    status: pb.NodeStatus | None = None
    requests: tuple[pb.RequestStatus, ...] = ()
    error: str = ""
    at_s: float = 0.0
    late_s: float = 0.0
    late_looks: int = 0
    peer: pb.PeerStatus | None = None

    @property
    def sides(self) -> tuple[Seen, ...]:
        """Return one node for each side of an engine's instance."""
        if self.status is None or not self.status.HasField("other_side"):
            return (self,)
        first = type(self.status)()
        first.CopyFrom(self.status)
        first.ClearField("other_side")
        return tuple(
            replace(self, status=status, requests=tuple(one for one in self.requests if one.role == status.role))
            for status in (first, self.status.other_side)
        )

    @property
    def key(self) -> str:
        """Name the node, or one side of it, among all nodes in the view."""
        return f"{self.address} {self.role}"

    @property
    def role(self) -> str:
        return "" if self.status is None else self.status.role

    @property
    def incarnation(self) -> int:
        return 0 if self.status is None else self.status.instance.incarnation

    @property
    def version(self) -> str:
        return "" if self.status is None else self.status.version or self.status.instance.version

    @property
    def state(self) -> str:
        """The state, in one or two words. A node whose ranks live but that cannot serve a request is not ready."""
        if self.status is None:
            return "unreachable" if self.peer is None else self.peer.state
        return "not ready" if self.status.state == "ready" and not self.status.ready else self.status.state

    @property
    def reason(self) -> str:
        return self.error if self.status is None else self.status.not_ready_reason

    @property
    def is_silent(self) -> bool:
        """Whether the node has stopped answering, as opposed to being slow in one look."""
        return self.late_s > 0 and (self.status is None or self.late_looks >= SILENT_LOOKS)

    @property
    def shown_state(self) -> str:
        return "silent" if self.is_silent else self.state

    @property
    def shown_reason(self) -> str:
        if not self.late_s:
            return self.reason
        return f"no answer for {self.late_s:.1f} s" + ("" if self.status is None else f"; it was {self.state} before")

    def sum(self, field: str) -> int:
        """Return the sum of a field over the ranks."""
        return 0 if self.status is None else sum(getattr(rank, field) for rank in self.status.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """A link between two ranks.

    Args:
        prefill, decode: Addresses of the two nodes.
        status: As measured at attach.
        now_bytes_per_s: Bytes per busy second since the look before. None means unknown; 0 means idle.
        share: Its speed relative to the probe's, for writes of the same sizes. None means unknown or idle.
    """

    prefill: str
    decode: str
    status: pb.LinkStatus
    now_bytes_per_s: float | None = None
    share: float | None = None

    @property
    def ends(self) -> tuple[str, str]:
        """Both ranks, the prefill rank first."""
        return f"{self.prefill} #{self.status.prefill_rank}", f"{self.decode} #{self.status.decode_rank}"

    @property
    def name(self) -> str:
        return " -> ".join(self.ends)

    @property
    def is_slow(self) -> bool:
        return self.share is not None and self.share < SLOW_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """A request as both nodes see it, joined by the name of its transfer.

    Args:
        decode, prefill: Addresses; empty means that this node does not report it.
        at_decode, at_prefill: Report of each node.
        num_ranks: Decode ranks; if no decode node reports the request, prefill ranks.
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
        """The stage on the decode node; for a request that waits there for prefill, the stage on the prefill node."""
        if self.at_decode is None or (self.at_decode.stage == "queued" and self.at_prefill is not None):
            return self.at_prefill.stage if self.at_prefill is not None else "queued"
        return self.at_decode.stage

    @property
    def computed(self) -> tuple[int, int]:
        """Computed prompt tokens, and all prompt tokens. They are equal once the prefill node has forgotten the request."""
        total = self.one.prompt_tokens
        if self.at_prefill is not None:
            return self.at_prefill.ready_tokens, total
        is_past = self.stage in ("generating", "ending")
        return (total if is_past else self.one.ready_tokens), total

    @property
    def moved(self) -> tuple[int, int]:
        """Ranks whose part of the transfer is complete, and all ranks."""
        return (self.num_ranks if self.stage == "generating" else min(self.one.ranks_done, self.num_ranks)), self.num_ranks

    @property
    def generated(self) -> tuple[int, int]:
        return self.one.generated_tokens, self.one.max_new_tokens

    @property
    def progress(self) -> tuple[str, int, int] | None:
        """Progress of the current stage: label, part and whole. None means that the stage counts nothing."""
        match self.stage:
            case "computing":
                return "computed tokens", *self.computed
            case "receiving":
                return "received by ranks", *self.moved
            case "sending":
                return "sent by ranks", *self.moved
            case "generating":
                return "generated tokens", *self.generated
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """Nodes, links and requests at one moment."""

    nodes: tuple[Seen, ...]
    links: tuple[LinkView, ...] = ()
    requests: tuple[RequestRow, ...] = ()

    def tier(self, role: str) -> list[Seen]:
        return [node for node in self.nodes if node.role == role]

    @property
    def rings(self) -> list[tuple[str, pb.RankStatus]]:
        """Name and status of each rank with a ring."""
        found = ((node.address, rank) for node in self.nodes if node.status is not None for rank in node.status.ranks)
        return [(f"{address} #{rank.rank}", rank) for address, rank in found if rank.ring_capacity]


def view_of(nodes: Iterable[Seen], before: Iterable[Seen] = ()) -> ClusterView:
    """Join the reports of nodes.

    Args:
        nodes: Nodes in the order in which they are shown.
        before: An earlier answer of each node. The differences give the speeds of links.
    """
    sides = [side for node in nodes for side in node.sides]
    earlier = {side.key: side for node in before for side in node.sides}
    return ClusterView(nodes=tuple(sides), links=tuple(_links(sides, earlier)), requests=tuple(_requests(sides)))


def _links(nodes: Sequence[Seen], before: Mapping[str, Seen]) -> Iterable[LinkView]:
    """Yield the links that decode nodes report, then those of prefill nodes to nodes outside the view."""
    by_life = {node.incarnation: node.address for node in nodes if node.incarnation}
    uses = _uses(nodes, before)
    seen: set[_Key] = set()
    for node in sorted(nodes, key=lambda one: one.role != "decode"):
        if node.status is None:
            continue
        named = {peer.incarnation: peer.address for peer in node.status.peers}
        for link in node.status.links:
            other = by_life.get(link.peer_incarnation) or named.get(link.peer_incarnation) or f"{link.peer_incarnation:#018x}"
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
"""Key of a link: incarnation and rank of the prefill side, and of the decode side."""


def _uses(nodes: Sequence[Seen], before: Mapping[str, Seen]) -> dict[_Key, tuple[float, float | None]]:
    """Return bytes per busy second and share of the probe's speed, for links with two looks; 0 and None mean idle."""
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
