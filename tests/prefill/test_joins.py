"""Decode instances that join and leave a prefill node: all ranks or none, one join at a time, every one of them ends once."""

from __future__ import annotations

import asyncio

import pytest

from tests.decode.leader_world import turns
from tests.prefill.join_server import JoinServer
from tests.runtime.instances import instance
from transfer.chunk import ChunkPlan
from transfer.connector import decode_instances as joins_module
from transfer.connector.decode_instances import Join
from transfer.connector.messages import AttachDecode, DecodeAttached, DecodeLost, DetachDecode
from transfer.errors import LayoutError, PeerUnreachable, ResourceExhausted, TransferError
from transfer.instance import Link
from transfer.sizes import Cut

LIFE = 5
RINGS = (8192, 4096, 0)
CUT = Cut(plan=ChunkPlan(chunk_tokens=8, layers_per_group=1), largest_piece_bytes=64)


def link(prefill_rank: int) -> Link:
    return Link(prefill_rank=prefill_rank, decode_rank=0, lane="x", latency_s=0.0, bandwidth_bytes_per_s=1.0)


class Leader(JoinServer):
    """A leader with two ranks that a test controls."""

    def __init__(self) -> None:
        super().__init__(3, num_ranks=2)
        self.sent: list[object] = []
        self.chosen_with: list[tuple[list[Link], int]] = []

    def _broadcast(self, message: object) -> None:
        self.sent.append(message)

    def _choose_cut(self, join: Join) -> Cut:
        self.chosen_with.append((join.links[:], join.ring_bytes))
        return CUT

    def opening(self, incarnation: int = LIFE) -> asyncio.Task[Join]:
        return asyncio.ensure_future(self.joins.open(instance(incarnation), "decode:1", ("a:1",)))

    def attached(self, rank: int, join: int, incarnation: int = LIFE) -> None:
        self.joins.on_attached(
            rank, DecodeAttached(join=join, incarnation=incarnation, links=(link(rank),), ring_bytes=RINGS[rank])
        )

    def rank_lost(self, rank: int, join: int, *, is_refused: bool = False) -> None:
        self.joins.on_rank_lost(rank, DecodeLost(join=join, incarnation=LIFE, reason="broke", is_refused=is_refused))

    async def joined(self) -> Join:
        opening = self.opening()
        await turns()
        number = self.attaches()[-1].join
        for rank in range(2):
            self.attached(rank, number)
        return await opening

    def attaches(self) -> list[AttachDecode]:
        return [message for message in self.sent if isinstance(message, AttachDecode)]

    def detaches(self) -> list[DetachDecode]:
        return [message for message in self.sent if isinstance(message, DetachDecode)]


async def test_an_instance_has_joined_when_every_rank_is_attached() -> None:
    leader = Leader()
    opening = leader.opening()
    await turns()
    leader.attached(0, 1)
    leader.attached(0, 1)  # said twice, heard once
    await turns()
    assert not opening.done() and leader.joins.find(LIFE) is None, "it cannot be sent requests yet"
    assert not leader.chosen_with, "how its requests are cut is decided when all links have been measured"
    leader.attached(1, 1)
    join = await opening
    assert leader.chosen_with == [([link(0), link(1)], min(RINGS[:2]))] and join.plan is CUT.plan
    assert leader.joins.find(LIFE) is join and list(leader.joins) == [join]
    assert join.links == [link(0), link(1)]
    leader.joins.close(LIFE, PeerUnreachable("it left"))
    leader.joins.close(LIFE, PeerUnreachable("said twice"))
    assert leader.joins.find(LIFE) is None and not list(leader.joins)
    assert leader.lost == ["it left"]
    assert str(join.lost.result()) == "it left"
    assert [message.reason for message in leader.detaches()] == ["it left"]


@pytest.mark.parametrize(("is_refused", "kind"), [(True, LayoutError), (False, PeerUnreachable)])
async def test_one_rank_that_cannot_attach_ends_the_join_for_all(is_refused: bool, kind: type[TransferError]) -> None:
    leader = Leader()
    opening = leader.opening()
    await turns()
    leader.attached(0, 1)
    leader.rank_lost(1, 1, is_refused=is_refused)
    with pytest.raises(kind, match="prefill rank 1: broke"):
        await opening
    assert len(leader.detaches()) == 1 and not list(leader.joins)


async def test_ranks_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins_module, "ATTACH_ALL_TIMEOUT_S", 0.5)
    leader = Leader()
    opening = leader.opening()
    await turns()
    leader.attached(0, 1)
    with pytest.raises(PeerUnreachable, match=r"prefill ranks \[1\] did not attach within 0.5 s"):
        await opening
    assert not list(leader.joins) and len(leader.detaches()) == 1


async def test_a_decode_leader_that_leaves_while_the_ranks_attach_is_forgotten() -> None:
    leader = Leader()
    opening = leader.opening()
    await turns()
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert not list(leader.joins) and len(leader.detaches()) == 1
    for rank in range(2):
        leader.attached(rank, 1)
    assert leader.joins.find(LIFE) is None


async def test_what_ranks_say_of_an_earlier_join_counts_for_nothing() -> None:
    leader = Leader()
    first = leader.opening()
    await turns()
    second = leader.opening()
    await turns()
    with pytest.raises(PeerUnreachable, match="joined again"):
        await first
    assert [message.join for message in leader.attaches()] == [1, 2]
    leader.attached(0, 1)
    leader.attached(1, 1)
    leader.rank_lost(0, 1)
    await turns()
    assert not second.done()
    leader.attached(0, 2)
    leader.attached(1, 2)
    assert (await second).is_joined


async def test_the_end_of_the_ranks_ends_every_join_without_them() -> None:
    leader = Leader()
    join = await leader.joined()
    opening = leader.opening(incarnation=6)
    await turns()
    leader.joins.forget_all(PeerUnreachable("rank 0 died"))
    assert str(join.lost.result()) == "rank 0 died"
    with pytest.raises(PeerUnreachable, match="rank 0 died"):
        await opening
    assert len(leader.lost) == 2 and not leader.detaches(), "there is nobody to tell"


async def test_joins_are_limited_and_one_that_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins_module, "MAX_JOINS", 2)
    leader = Leader()
    openings = [leader.opening(life) for life in (1, 2)]
    await turns()
    with pytest.raises(ResourceExhausted, match="2 decode instances have joined this prefill node"):
        await leader.opening(3)
    leader.joins.close(1, PeerUnreachable("it left"))
    openings.append(leader.opening(3))
    await turns()
    assert [join.incarnation for join in leader.joins] == [2, 3]
    leader.joins.forget_all(PeerUnreachable("the test is over"))
    assert all(isinstance(one, PeerUnreachable) for one in await asyncio.gather(*openings, return_exceptions=True))
