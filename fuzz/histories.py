"""Histories of a protocol machine: lists of steps, of which the peer's may be anything and this side's are lawful.

A step is ``[name, number, number, ...]``, in msgpack. Every number means something: what is missing is 0, what is too large for a
choice goes round. So every input is a history, and a change of a number is another one.

A history whose first list ends in ``"crowded"`` has two requests and one unknown request, two sessions, six positions and four
chunks. Its messages often collide, cross and repeat each other. In other histories, numbers are at the borders.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgpack

from fuzz.trees import BORDERS, BYTE_SHARE, changed_bytes, changed_tree
from transfer.chunk import ChunkPlan
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Route, Shard, routes
from transfer.ring import ALIGNMENT_BYTES

MAX_STEPS = 300
MAX_BYTES = 6000
PLAN = ChunkPlan(chunk_tokens=4, layers_per_group=1)
LAYOUT = KVLayout(
    layers=(
        LayerSpec(num_kv_heads=4, k_head_dim=8, v_head_dim=8),
        LayerSpec(kind=LayerKind.SLIDING_WINDOW, num_kv_heads=4, k_head_dim=8, v_head_dim=8, window_tokens=6),
    ),
    dtype=DType.FLOAT16,
)
CUTS = ((1, 1), (1, 2), (2, 1), (2, 2))
TOKENS = (1, 4, 8, 11, 20)
IDS = ("r0", "r1", "r2", "r3", "nobody", "x" * 128)
CROWDED = "crowded"
PREFILL_LIFE, DECODE_LIFE = 11, 22
MAX_SESSIONS = 12


class Step:
    """The numbers of one step, taken one after the other."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._at = 0

    def number(self) -> int:
        """The next number, whatever it is."""
        value = self._items[self._at] if self._at < len(self._items) else 0
        self._at += 1
        return value if type(value) is int else 0

    def below(self, end: int) -> int:
        """A choice among `end`."""
        return self.number() % end

    def unsigned(self) -> int:
        """A number of a message: 64 bits, without a sign."""
        return self.number() % 2**64

    def request(self) -> str:
        """A request of this side."""
        return IDS[self.below(4)]

    def session(self, peers: Sequence[int], edge_of: Callable[[int], int] = lambda _: 0) -> int:
        """Return a session for the peer's message, possibly one that does not exist.

        Args:
            peers: The session of each route; 0 where it is closed.
            edge_of: Returns the first position of a crowded history, given a session.
        """
        return 1 + self.below(4)

    def chunk(self) -> int:
        """The index of a chunk, as the peer says it."""
        return self.unsigned()

    def attempt(self) -> int:
        """The number of an attempt, as the peer says it."""
        return self.unsigned()

    def num_bytes(self, right: int) -> int:
        """The size of a payload, as the peer says it; 0 means the right one."""
        return self.unsigned() or right

    def seconds(self) -> float:
        """Time that passes: less than a heartbeat, three heartbeats, or more than a write may take."""
        return (0.1, 1.5, 31.0)[self.below(3)]

    def position(self) -> int:
        """A position of a ring: small numbers count cells, larger ones bytes."""
        value = self.number()
        return value * ALIGNMENT_BYTES if 0 <= value < 256 else value % 2**64

    def head(self, *, peer: int, own: int) -> dict[str, Any]:
        """What a message of the peer begins with: its life, as a rule the right one; a request; a route."""
        return {
            "incarnation": (peer, peer, peer, own, 2**64 - 1)[self.below(5)],
            "request_id": IDS[self.below(len(IDS))],
            "route": self.unsigned(),
        }

    def _nested(self, items: list[Any]) -> Step:
        return Step(items)

    def list(self) -> list[Step]:
        """A nested list of steps, at most 64."""
        value = self._items[self._at] if self._at < len(self._items) else []
        self._at += 1
        return [self._nested(item) for item in value if isinstance(item, list)][:64] if isinstance(value, list) else []


class CrowdedStep(Step):
    """One step of a crowded history."""

    def __init__(self, items: list[Any], *, edge: int = 0) -> None:
        super().__init__(items)
        self._edge = edge
        self._route = 0

    def request(self) -> str:
        return IDS[self.below(2)]

    def session(self, peers: Sequence[int], edge_of: Callable[[int], int] = lambda _: 0) -> int:
        self._route = self.below(len(peers))
        self._edge = edge_of(peers[self._route])
        return peers[self._route]

    def chunk(self) -> int:
        return self.below(4)

    def attempt(self) -> int:
        return self.below(2)

    def num_bytes(self, right: int) -> int:
        return self.below(2) or right

    def position(self) -> int:
        """One of six, from the ring's edge on."""
        return self._edge + self.below(6) * ALIGNMENT_BYTES

    def head(self, *, peer: int, own: int) -> dict[str, Any]:
        """The right life; one of three requests; as a rule the session's own route."""
        self.number()
        request_id, other = ("r0", "r1", "nobody")[self.below(3)], self.below(4) == 3
        return {"incarnation": peer, "request_id": request_id, "route": self._route ^ other}

    def _nested(self, items: list[Any]) -> Step:
        return CrowdedStep(items, edge=self._edge)


def read(data: bytes) -> tuple[Step, list[tuple[str, Step]]]:
    """The setting of a history, and its steps by name. Bytes that are none give an empty one."""
    try:
        tree = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        tree = []
    items = [item for item in tree if isinstance(item, list)] if isinstance(tree, list) else []
    head, steps = (items[0], items[1:]) if items else ([], [])
    kind = CrowdedStep if head and head[-1] == CROWDED else Step
    return Step(head), [(item[0], kind(item[1:])) for item in steps[:MAX_STEPS] if item and isinstance(item[0], str)]


class Played(Protocol):
    """A machine with all that is around it."""

    def play(self, name: str, step: Step) -> None:
        """Take one step; a name that is none of this side's is something that the peer says."""

    def end(self) -> None:
        """The peer is gone, and what is under way settles; raises `Finding` where something is left."""


def check_with(world: Callable[[Step], Played]) -> Callable[[bytes], None]:
    """The check of a target: a whole history in a world of its own."""

    def check(data: bytes) -> None:
        setting, steps = read(data)
        played = world(setting)
        for name, step in steps:
            played.play(name, step)
        played.end()

    return check


def routes_of(cut: int) -> tuple[Route, ...]:
    prefill_tp, decode_tp = CUTS[cut % len(CUTS)]
    return routes(LAYOUT, Shard(tp_size=prefill_tp), Shard(tp_size=decode_tp))


Make = Callable[[random.Random], list[Any]]


def mutator(kinds: Mapping[str, Make]) -> Callable[[bytes, random.Random], bytes]:
    """Changes histories: steps put in, left out, moved, repeated here or anywhere; numbers changed.

    Args:
        kinds: Name of a step -> what makes its numbers.
    """

    def step(rng: random.Random) -> list[Any]:
        name = rng.choice(tuple(kinds))
        return [name, *kinds[name](rng)]

    def mutate(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < BYTE_SHARE / 4:
            return changed_bytes(data, rng)
        try:
            tree = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            tree = [[0]]
        if not isinstance(tree, list) or not tree:
            tree = [[0]]
        for _ in range(rng.choice((1, 2, 4, 8))):
            at = rng.randrange(1, len(tree) + 1)
            match rng.randrange(10):
                case 0 | 1:
                    tree.insert(at, step(rng))
                case 2:
                    tree.append(step(rng))
                case 3:
                    del tree[at : at + rng.choice((1, 1, 3))]
                case 4:
                    tree[at:at] = tree[at : at + rng.randrange(1, 12)]
                case 5 if at < len(tree):
                    tree.insert(rng.randrange(1, len(tree)), tree.pop(at))
                case 6 if at < len(tree):
                    tree.insert(rng.randrange(1, len(tree) + 1), tree[at])
                case _:
                    if at < len(tree) and isinstance(tree[at], list) and tree[at]:
                        changed = changed_tree(tree[at][1:], rng)
                        tree[at] = [tree[at][0], *(changed if isinstance(changed, list) else [changed])]
        try:
            while len(packed := bytes(msgpack.packb(tree))) > MAX_BYTES:
                del tree[len(tree) * 3 // 4 :]
        except (ValueError, OverflowError, TypeError):
            return changed_bytes(data, rng)
        return packed

    return mutate


def near(rng: random.Random) -> int:
    """A small number as a rule, one at a border now and then."""
    return rng.randrange(6) if rng.random() < 0.85 else rng.choice([border for border in BORDERS if border >= 0])


def numbers(count: int) -> Make:
    return lambda rng: [near(rng) for _ in range(count)]


def listed(count: int, of: int) -> Make:
    """So many numbers, and a list of some lists of `of` numbers."""
    return lambda rng: [*(near(rng) for _ in range(count)), [[near(rng) for _ in range(of)] for _ in range(rng.randrange(5))]]


def history(*steps: list[Any]) -> bytes:
    return bytes(msgpack.packb(list(steps)))
