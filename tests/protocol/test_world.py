"""Thousands of histories of a simulated cluster (world.py): whatever goes wrong, nothing wrong is scattered and all ends.

`--hypothesis-profile=soak` plays far more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_node.receiver import Receiver
from prefill_node.sender import Sender
from prefill_node.sender_state import Piece, RouteState
from tests.protocol.links import Faults
from tests.protocol.memory import RingMemory, Tag, WorldError
from tests.protocol.world import World, WorldConfig
from transfer.ring import Grant, RingView, StagingAllocator

pytestmark = pytest.mark.timeout(600)  # hundreds of histories each: half a minute on a quiet machine

SHAPES = [(4, 2), (2, 4), (3, 2), (1, 1)]


def histories(num_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many histories in a normal run, and as many as the profile says where it asks for more (soak)."""
    return settings(
        max_examples=max(num_examples, settings().max_examples if settings().max_examples > 100 else 0), deadline=None
    )


@st.composite
def configs(
    draw: st.DrawFn,
    *,
    is_one_sided: bool,
    faults: st.SearchStrategy[Faults],
    is_revocable: bool = True,
    direct: tuple[int, ...] = (0,),
) -> WorldConfig:
    prefill_tp, decode_tp = draw(st.sampled_from(SHAPES))
    return WorldConfig(
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        is_one_sided=is_one_sided,
        is_revocable=is_revocable,
        direct=draw(st.sampled_from(direct)),
        spare_cells=draw(st.sampled_from([0, 1, 2, 5, 20])),
        num_slots=draw(st.integers(1, 4)),
        grants_ahead=draw(st.integers(1, 8)),
        layers_per_group=draw(st.sampled_from([0, 1])),
        num_requests=draw(st.integers(1, 5)),
        faults=draw(faults),
    )


RATES = st.sampled_from([0, 10, 30])
NETWORK = st.builds(
    Faults,
    loss=RATES,
    duplicate=RATES,
    reorder=st.booleans(),
    corrupt=st.sampled_from([0, 5, 20]),
    cancel=st.sampled_from([0, 0, 50]),
    abort=st.sampled_from([0, 0, 50]),
)
DEATHS = st.builds(
    Faults,
    loss=RATES,
    duplicate=RATES,
    reorder=st.booleans(),
    corrupt=st.sampled_from([0, 5]),
    cancel=st.sampled_from([0, 50]),
    abort=st.sampled_from([0, 50]),
    link_deaths=st.integers(0, 3),
    sender_restarts=st.integers(0, 1),
    receiver_restarts=st.integers(0, 1),
)
SEEDS = st.integers(0, 2**32 - 1)


@histories(600)
@given(config=configs(is_one_sided=False, faults=NETWORK), seed=SEEDS)
def test_two_sided_histories_on_a_bad_network(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@histories(500)
@given(config=configs(is_one_sided=True, faults=NETWORK), seed=SEEDS)
def test_one_sided_histories_on_a_bad_network(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@histories(500)
@given(config=configs(is_one_sided=False, faults=DEATHS), seed=SEEDS)
def test_two_sided_histories_with_deaths(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@histories(400)
@given(config=configs(is_one_sided=True, faults=DEATHS), seed=SEEDS)
def test_one_sided_histories_with_deaths(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@histories(200)
@given(config=configs(is_one_sided=True, direct=(50, 100), faults=NETWORK), seed=SEEDS)
def test_direct_histories_on_a_bad_network(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@histories(300)
@given(config=configs(is_one_sided=True, direct=(50, 100), faults=DEATHS), seed=SEEDS)
def test_direct_histories_with_deaths(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@histories(200)
@given(config=configs(is_one_sided=True, is_revocable=False, faults=DEATHS), seed=SEEDS)
def test_unrevocable_histories_with_deaths(config: WorldConfig, seed: int) -> None:
    World(config, seed).run()


@pytest.mark.parametrize(
    ("is_one_sided", "direct"), [(False, 0), (True, 0), (True, 100)], ids=["two_sided", "one_sided", "direct"]
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}to{shape[1]}")
def test_without_faults_every_request_arrives_through_the_smallest_ring(
    shape: tuple[int, int], is_one_sided: bool, direct: int
) -> None:
    prefill_tp, decode_tp = shape
    for seed in range(20):
        config = WorldConfig(
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            is_one_sided=is_one_sided,
            direct=direct,
            spare_cells=0,
            num_slots=1,
            grants_ahead=8,
            num_requests=6,
        )
        world = World(config, seed)
        world.run()
        assert not any(plan.excuses for plan in world.requests.values())
        assert all(len(receiver.outcome) == 6 for receiver in world.receivers)


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two_sided", "one_sided"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}to{shape[1]}")
def test_watermarks_that_go_to_those_whom_they_concern_are_enough(
    shape: tuple[int, int], is_one_sided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs the heartbeats that everybody gets, as long as nothing is lost."""
    monkeypatch.setattr(World, "_heartbeat", lambda self: None)
    prefill_tp, decode_tp = shape
    for seed in range(20):
        config = WorldConfig(
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            is_one_sided=is_one_sided,
            spare_cells=seed % 3,
            num_slots=2,
            grants_ahead=8,
        )
        World(config, seed).run()


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two_sided", "one_sided"])
def test_watermarks_without_room_for_every_range_are_enough(is_one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring in which most is released and little can be said: no session is closed because its pieces were not taken over."""
    monkeypatch.setattr("transfer.ring.MAX_PUBLISHED_RANGES", 1)
    monkeypatch.setattr("decode_node.receiver.MAX_PUBLISHED_RANGES", 1)
    for seed in range(10):
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


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two_sided", "one_sided"])
def test_one_look_a_turn_is_enough(is_one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grants that a turn has no steps left for are looked at by the next turns: nothing wedges, also with faults."""
    monkeypatch.setattr("transfer.ring_index.LOOK_STEPS", 1)
    faults = Faults(loss=20, duplicate=20, reorder=True, corrupt=5, cancel=20, abort=20)
    for seed in range(10):
        for more in ({}, {"faults": faults}):
            config = WorldConfig(
                prefill_tp=2, decode_tp=1, is_one_sided=is_one_sided, spare_cells=seed % 3, num_slots=2, grants_ahead=8, **more
            )
            world = World(config, seed)
            world.run()
            assert more or not any(plan.excuses for plan in world.requests.values())


def test_the_faults_happen_and_some_requests_survive_them() -> None:
    """The histories are worth playing: in a fair number of them requests fail, and in a fair number they complete."""
    faults = Faults(loss=20, duplicate=20, reorder=True, corrupt=5, cancel=20, abort=20, link_deaths=1)
    outcomes: list[str] = []
    broken = 0
    for seed in range(40):
        world = World(WorldConfig(faults=faults), seed)
        world.run()
        outcomes.extend(receiver.outcome[name] for receiver in world.receivers for name in receiver.outcome)
        broken += len(world.corruptions)
    assert outcomes.count("complete") > 40
    assert outcomes.count("drained") > 40
    assert broken > 10


@pytest.mark.parametrize("direct", [0, 100], ids=["writes", "gathers"])
def test_bytes_do_land_after_the_receiver_closed(direct: int) -> None:
    """Otherwise the quarantine until `SessionOver` would be played without a reason for it."""
    num_late = 0
    outcomes: list[str] = []
    for seed in range(40):
        faults = Faults(corrupt=5, cancel=20, link_deaths=3, sender_restarts=1)
        world = World(WorldConfig(is_one_sided=True, is_revocable=False, direct=direct, faults=faults), seed)
        world.run()
        num_late += sum(link.num_late for link in world.links.values())
        outcomes.extend(receiver.outcome[name] for receiver in world.receivers for name in receiver.outcome)
    assert num_late > 20
    assert outcomes.count("complete") > 40
    assert outcomes.count("drained") > 40


# The world would notice: each of these protocols is wrong in one way.


def play(num_seeds: int, *, is_one_sided: bool, is_revocable: bool = True, direct: int = 0, faults: Faults | None = None) -> None:
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


def test_the_world_notices_a_writer_that_does_not_ask_the_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingView, "blocker_of", lambda self, grant: None)
    with pytest.raises(WorldError, match="R1"):
        play(20, is_one_sided=True)


def test_the_world_notices_a_receive_that_is_posted_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingAllocator, "blocker_of", lambda self, grant: None)
    monkeypatch.setattr(StagingAllocator, "check_invariants", lambda self: None)
    with pytest.raises(WorldError, match="R1"):
        play(20, is_one_sided=False)


def test_the_world_notices_that_watermarks_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingView, "update", lambda self, watermark: False)
    with pytest.raises(WorldError, match="wedged"):
        play(1, is_one_sided=False)


@pytest.mark.parametrize("direct", [0, 100], ids=["writes", "gathers"])
def test_the_world_notices_a_close_that_is_taken_for_the_end(monkeypatch: pytest.MonkeyPatch, direct: int) -> None:
    honest = Receiver._on_session_lost
    monkeypatch.setattr(Receiver, "_on_session_lost", lambda self, event: honest(self, replace(event, is_over=True)))
    monkeypatch.setattr(Receiver, "_on_session_over", lambda self, session: None)
    with pytest.raises(WorldError, match="R1"):
        play(100, is_one_sided=True, is_revocable=False, direct=direct, faults=Faults(link_deaths=3))


def test_the_world_notices_an_end_that_is_never_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Receiver, "_on_session_over", lambda self, session: None)
    with pytest.raises(WorldError, match="wedged"):
        play(20, is_one_sided=True, is_revocable=False, faults=Faults(link_deaths=3))


def test_the_world_notices_pages_that_are_freed_before_a_second_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_on_written", freeing(Sender._on_written))
    with pytest.raises(WorldError, match="after its source was released"):
        play(20, is_one_sided=True, direct=100, faults=Faults(corrupt=20))


def freeing(honest: Callable[[Sender, Piece], None]) -> Callable[[Sender, Piece], None]:
    """As a sender would do it that counts gathers and forgets that one may come again."""

    def on_written(self: Sender, piece: Piece) -> None:
        honest(self, piece)
        if piece.request.to_gather == 0:
            self._release_source(piece.request)

    return on_written


def test_the_world_notices_a_writer_that_drains_before_its_gather_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RouteState, "is_drained", property(lambda self: True))
    with pytest.raises(WorldError, match="R1"):
        play(50, is_one_sided=True, direct=100, faults=Faults(cancel=50))


def test_the_world_notices_a_decline_beside_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "_drop_written", declining(Sender._drop_written))
    with pytest.raises(WorldError, match="is sent twice"):
        play(50, is_one_sided=True, direct=100, faults=Faults(cancel=50))


def declining(honest: Callable[[Sender, Piece], None]) -> Callable[[Sender, Piece], None]:
    def drop_written(self: Sender, piece: Piece) -> None:
        self._decline(piece.route.session, piece.granted, attempt=piece.attempt)
        honest(self, piece)

    return drop_written


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
