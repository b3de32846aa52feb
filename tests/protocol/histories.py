"""Kinds of histories of a simulated cluster (world.py), and how each seed makes one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.protocol.links import Faults
from tests.protocol.world import World, WorldConfig

SHAPES = [(4, 2), (2, 4), (3, 2), (1, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Histories of one kind of data plane, on a network that loses, repeats, reorders and corrupts; or with deaths too."""

    is_one_sided: bool
    direct: tuple[int, ...] = (0,)
    signals: tuple[int, ...] = (0,)
    is_revocable: bool = True
    has_deaths: bool = False

    def world(self, seed: int) -> World:
        """The world of that seed: the seed chooses its shape, its sizes, its faults and when they happen."""
        chance = random.Random(seed)
        choose = chance.choice
        prefill_tp, decode_tp = choose(SHAPES)
        config = WorldConfig(
            prefill_tp=prefill_tp,
            decode_tp=decode_tp,
            is_one_sided=self.is_one_sided,
            is_revocable=self.is_revocable,
            direct=choose(self.direct),
            spare_cells=choose([0, 1, 2, 5, 20]),
            num_slots=choose(range(1, 5)),
            grants_ahead=choose(range(1, 9)),
            layers_per_group=choose([0, 1]),
            num_requests=choose(range(1, 6)),
            faults=Faults(
                loss=choose([0, 10, 30]),
                duplicate=choose([0, 10, 30]),
                reorder=choose([False, True]),
                corrupt=choose([0, 5, 20]),
                cancel=choose([0, 0, 50]),
                abort=choose([0, 0, 50]),
                link_deaths=choose(range(4)) if self.has_deaths else 0,
                sender_restarts=choose([0, 1]) if self.has_deaths else 0,
                receiver_restarts=choose([0, 1]) if self.has_deaths else 0,
            ),
            arriving_tokens=choose([0, 8]),
            token_layers=choose([0, 4, 9]),
            signals=choose(self.signals),
        )
        return World(config, chance.getrandbits(32))


KINDS = {
    "two_sided": Kind(is_one_sided=False),
    "one_sided": Kind(is_one_sided=True),
    "two_sided_with_deaths": Kind(is_one_sided=False, has_deaths=True),
    "one_sided_with_deaths": Kind(is_one_sided=True, has_deaths=True),
    "direct": Kind(is_one_sided=True, direct=(50, 100), signals=(0, 50, 100)),
    "direct_with_deaths": Kind(is_one_sided=True, direct=(50, 100), signals=(0, 50, 100), has_deaths=True),
    "unrevocable_with_deaths": Kind(is_one_sided=True, is_revocable=False, has_deaths=True),
}


@dataclass(slots=True)
class Played:
    """What happened in histories that all ended well."""

    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    signals: Counter[str] = field(default_factory=Counter)  # used or given up
    num_late: int = 0  # bytes that landed after the receiver had closed


def play(kind: Kind, seeds: Iterable[int]) -> Played:
    """Play a history for each seed.

    Raises:
        WorldError, LocalProtocolError: A rule was broken, or something never ended; a note names the seed.
    """
    played = Played()
    for seed in seeds:
        world = kind.world(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed} of {kind}")
            raise
        played.faults += world.happened
        played.signals += world.signals_seen
        played.outcomes.update(outcome for receiver in world.receivers for outcome in receiver.outcome.values())
        played.num_late += sum(link.num_late for link in world.links.values())
    return played
