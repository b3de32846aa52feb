"""Histories of a simulated cluster (world.py): whatever goes wrong, nothing wrong is scattered and all ends.

tests/cluster/long plays far more of them.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tests.protocol.histories import KINDS, SHAPES, play
from tests.protocol.links import Faults
from tests.protocol.memory import RingMemory, Tag, WorldError
from tests.protocol.world import World, WorldConfig
from transfer.receive import events as rx
from transfer.receive.receiver import Receiver
from transfer.ring import Grant, RingView, StagingAllocator, grant_key
from transfer.send import events as tx
from transfer.send.sender import Sender
from transfer.send.state import SenderRoute, SenderStage

DEATHS = {"link_deaths", "sender_restarts", "receiver_restarts"}
BOTH = pytest.mark.parametrize("is_one_sided", [False, True], ids=["two_sided", "one_sided"])


@pytest.mark.parametrize("name", KINDS)
def test_whatever_goes_wrong_nothing_wrong_is_scattered_and_all_ends(name: str) -> None:
    """And the histories are worth playing: each fault happens, some requests fail, and some complete."""
    kind = KINDS[name]
    played = play(kind, range(100))
    assert {fault for fault, count in played.faults.items() if count} == {one.name for one in fields(Faults)} - (
        set() if kind.has_deaths else DEATHS
    )
    assert played.outcomes["complete"] > 50 and played.outcomes["drained"] > 50
    assert kind.signals == (0,) or (played.signals["used"] > 50 and played.signals["given up"] > 50)
    # Otherwise the quarantine until `ReceiverSessionOver` would be played without a reason for it.
    assert played.num_late > 20 or (kind.is_revocable and (kind.direct == (0,) or not kind.has_deaths))


@pytest.mark.parametrize("has_heartbeats", [True, False], ids=["heartbeats", "no_heartbeats"])
@pytest.mark.parametrize(
    ("is_one_sided", "direct"), [(False, 0), (True, 0), (True, 100)], ids=["two_sided", "one_sided", "direct"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}to{shape[1]}")
def test_without_faults_every_request_arrives(
    shape: tuple[int, int], is_one_sided: bool, direct: int, has_heartbeats: bool
) -> None:
    """Through the smallest ring and one slot, or by those watermarks alone that go to the writers whom they concern.

    In every other world there are pages for two chunks of a request at a time.
    """
    for seed in range(4):
        config = WorldConfig(
            prefill_tp=shape[0],
            decode_tp=shape[1],
            is_one_sided=is_one_sided,
            direct=direct,
            spare_cells=0 if has_heartbeats else seed % 3,
            num_slots=1 if has_heartbeats else 2,
            grants_ahead=8,
            num_requests=6,
            arriving_tokens=(seed % 2) * 8,
            has_heartbeats=has_heartbeats,
        )
        world = World(config, seed)
        world.run()
        assert not any(plan.excuses for plan in world.requests.values())
        assert all(len(receiver.outcome) == 6 for receiver in world.receivers)


@BOTH
def test_watermarks_without_room_for_every_range_are_enough(is_one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring in which most is released and little can be said: no session is closed because its pieces were not taken over."""
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", 1)
    monkeypatch.setattr("transfer.receive.receiver.MAX_PUBLISHED_RANGES", 1)
    for seed in range(4):
        config = WorldConfig(
            prefill_tp=2,
            decode_tp=1,
            is_one_sided=is_one_sided,
            spare_cells=200,
            num_slots=1,
            grants_ahead=8,
            num_requests=24,
        )
        world = World(config, seed)
        world.run()
        assert not any(plan.excuses for plan in world.requests.values())


@BOTH
def test_one_look_a_turn_is_enough(is_one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants that a turn has no steps left for are looked at by the next turns: nothing wedges, also with faults."""
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    broken = Faults(loss=20, duplicate=20, reorder=True, corrupt=5, cancel=20, abort=20)
    for seed in range(6):
        for faults in (Faults(), broken):
            config = WorldConfig(
                prefill_tp=2, decode_tp=1, is_one_sided=is_one_sided, spare_cells=seed % 3, grants_ahead=8, faults=faults
            )
            world = World(config, seed)
            world.run()
            assert faults is broken or not any(plan.excuses for plan in world.requests.values())


# The world would notice: each of these protocols is wrong in one way.


def play_wrong(
    num_seeds: int, *, is_one_sided: bool, is_revocable: bool = True, direct: int = 0, faults: Faults | None = None
) -> None:
    for seed in range(num_seeds):
        config = WorldConfig(
            is_one_sided=is_one_sided,
            is_revocable=is_revocable,
            direct=direct,
            spare_cells=0,
            grants_ahead=8,
            faults=faults or Faults(),
        )
        World(config, seed).run()


@pytest.mark.parametrize(
    ("owner", "method", "wrong", "message", "options"),
    [
        (RingView, "blocker_of", lambda self, grant: None, "R1", {"is_one_sided": True}),
        (StagingAllocator, "blocker_of", lambda self, grant: None, "R1", {"is_one_sided": False}),
        (RingView, "update", lambda self, watermark: False, "wedged", {"is_one_sided": False}),
        (
            SenderRoute,
            "is_drained",
            property(lambda self: True),
            "R1",
            {"is_one_sided": True, "direct": 100, "faults": Faults(cancel=50)},
        ),
    ],
    ids=["no watermark is asked", "receives are posted early", "watermarks stop", "drained before the gather is done"],
)
def test_the_world_notices_a_wrong_method(
    owner: type, method: str, wrong: object, message: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagingAllocator, "check_invariants", lambda self: None)
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(WorldError, match=message):
        play_wrong(50, **options)


@pytest.mark.parametrize("direct", [0, 100], ids=["writes", "gathers"])
def test_the_world_notices_a_close_that_is_taken_for_the_end(monkeypatch: pytest.MonkeyPatch, direct: int) -> None:
    honest = Receiver.handle

    def handle(self: Receiver, event: rx.Event, now_s: float) -> list[rx.Action]:
        if isinstance(event, rx.ReceiverSessionOver):
            return []
        return honest(self, replace(event, is_over=True) if isinstance(event, rx.ReceiverSessionLost) else event, now_s)

    monkeypatch.setattr(Receiver, "handle", handle)
    with pytest.raises(WorldError, match="R1"):
        play_wrong(100, is_one_sided=True, is_revocable=False, direct=direct, faults=Faults(link_deaths=3))


def test_the_world_notices_an_end_that_is_never_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Receiver.handle
    monkeypatch.setattr(
        Receiver,
        "handle",
        lambda self, event, now_s: [] if isinstance(event, rx.ReceiverSessionOver) else honest(self, event, now_s),
    )
    with pytest.raises(WorldError, match="wedged"):
        play_wrong(20, is_one_sided=True, is_revocable=False, faults=Faults(link_deaths=3))


@pytest.mark.parametrize("direct", [0, 100], ids=["staged", "direct"])
def test_the_world_notices_pages_that_are_freed_before_a_second_gather(monkeypatch: pytest.MonkeyPatch, direct: int) -> None:
    """As a sender would do it that keeps the pages until every piece was gathered, and forgets that one may be gathered again."""
    honest = Sender.handle
    gathered = (SenderStage.WRITING, SenderStage.WRITTEN, SenderStage.RELEASED)

    def handle(self: Sender, event: tx.Event, now_s: float) -> list[tx.Action]:
        actions = honest(self, event, now_s)
        for request in self.requests.values():
            pieces = [piece for route in request.routes.values() for piece in route.pieces.values() if piece.stage in gathered]
            if len(pieces) == request.num_pieces and not request.source_released:
                request.source_released = True
                actions.append(tx.SourceReleased(request_id=request.request_id))
        return actions

    monkeypatch.setattr(Sender, "handle", handle)
    with pytest.raises(WorldError, match="after its source was released"):
        play_wrong(20, is_one_sided=True, direct=direct, faults=Faults(corrupt=20))


def test_the_world_notices_a_decline_beside_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Sender.handle

    def handle(self: Sender, event: tx.Event, now_s: float) -> list[tx.Action]:
        begun = (SenderStage.GATHERING, SenderStage.WRITTEN)
        pieces = [piece for request in self.requests.values() for piece in request.outstanding() if piece.stage in begun]
        actions = honest(self, event, now_s)
        for piece in pieces:
            if piece.stage is SenderStage.DROPPED:
                actions.append(tx.Decline(session=piece.session, key=grant_key(piece.granted.begin, piece.attempt)))
        return actions

    monkeypatch.setattr(Sender, "handle", handle)
    with pytest.raises(WorldError, match="is sent twice"):
        play_wrong(50, is_one_sided=True, direct=100, faults=Faults(cancel=50))


def test_the_memory_notices_bytes_of_another_piece() -> None:
    memory = RingMemory(1024)
    grant = Grant(256, 768)
    first, second = Tag(request_id="a", route=0, chunk=0), Tag(request_id="a", route=0, chunk=1)
    memory.begin_landing(1, grant, 512, set())
    with pytest.raises(WorldError, match="writes 1 and 2 land in one byte"):
        memory.begin_landing(2, Grant(1280, 1536), 10, set())
    memory.end_landing(1, grant, 512, first, is_broken=False)
    with pytest.raises(WorldError, match="finds bytes of"):
        memory.begin_scatter(grant, 512, second)
    with pytest.raises(WorldError, match="not scattered yet"):
        memory.begin_landing(3, Grant(1280, 1536), 256, set())
