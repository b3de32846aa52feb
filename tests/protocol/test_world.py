"""Thousands of histories of a simulated cluster (world.py): whatever goes wrong, nothing wrong is scattered and all ends.

`--hypothesis-profile=soak` plays far more of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.links import Faults
from tests.protocol.memory import RingMemory, Tag, WorldError
from tests.protocol.world import World, WorldConfig
from transfer.ring import Grant, RingView, StagingAllocator

SHAPES = [(4, 2), (2, 4), (3, 2), (1, 1)]


def histories(num_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """So many histories in a normal run, and as many as the profile says where it asks for more (soak)."""
    return settings(
        max_examples=max(num_examples, settings().max_examples if settings().max_examples > 100 else 0), deadline=None
    )


@st.composite
def configs(draw: st.DrawFn, *, is_one_sided: bool, faults: st.SearchStrategy[Faults]) -> WorldConfig:
    prefill_tp, decode_tp = draw(st.sampled_from(SHAPES))
    return WorldConfig(
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        is_one_sided=is_one_sided,
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


@pytest.mark.parametrize("is_one_sided", [False, True], ids=["two_sided", "one_sided"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}to{shape[1]}")
def test_without_faults_every_request_arrives_through_the_smallest_ring(shape: tuple[int, int], is_one_sided: bool) -> None:
    prefill_tp, decode_tp = shape
    for seed in range(20):
        config = WorldConfig(
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            is_one_sided=is_one_sided,
            spare_cells=0,
            num_slots=1,
            grants_ahead=8,
            num_requests=6,
        )
        world = World(config, seed)
        world.run()
        assert not any(plan.excuses for plan in world.requests.values())
        assert all(len(receiver.outcome) == 6 for receiver in world.receivers)


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


# The world would notice: each of these protocols is wrong in one way.


def play(num_seeds: int, *, is_one_sided: bool, faults: Faults | None = None) -> None:
    for seed in range(num_seeds):
        config = WorldConfig(is_one_sided=is_one_sided, spare_cells=0, grants_ahead=8, faults=faults or Faults())
        World(config, seed).run()


def test_the_world_notices_a_writer_that_does_not_ask_the_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingView, "is_writable", lambda self, grant: True)
    monkeypatch.setattr(RingView, "horizon", property(lambda self: math.inf))
    with pytest.raises(WorldError, match="R1"):
        play(20, is_one_sided=True)


def test_the_world_notices_a_receive_that_is_posted_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagingAllocator, "is_writable", lambda self, grant: True)
    monkeypatch.setattr(StagingAllocator, "horizon", property(lambda self: math.inf))
    monkeypatch.setattr(StagingAllocator, "check_invariants", lambda self: None)
    with pytest.raises(WorldError, match="R1"):
        play(20, is_one_sided=False)


def test_the_world_notices_that_watermarks_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingView, "update", lambda self, watermark: False)
    with pytest.raises(WorldError, match="wedged"):
        play(1, is_one_sided=False)


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
