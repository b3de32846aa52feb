"""Changing what is structured: trees of plain values (msgpack, JSON, YAML), and bytes where nothing else is known.

Every change is drawn from a `random.Random`, so that an input can be made again from its seed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, Final

BORDERS: Final = (
    *(
        0,
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        15,
        16,
        17,
        31,
        32,
        63,
        64,
        127,
        128,
        129,
        255,
        256,
        257,
        511,
        512,
        513,
        1023,
        1024,
        1025,
        4095,
        4096,
    ),
    *(4097, 65535, 65536, 65537, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**53, 2**62, 2**63 - 1, 2**63),
    *(2**64 - 256, 2**64 - 1, -1, -2, -128, -(2**31), -(2**63)),
)
"""Numbers at which something changes: limits of the code, of the wire, of the machine."""

TEXTS: Final = (
    "",
    "0",
    "1",
    "-1",
    "true",
    "null",
    "nan",
    "inf",
    "x",
    "é",
    "\U0001f600",
    "\n",
    "\x00",
    "a\tb",
    "..",
    "/",
    "%s",
    "{}",
    "~",
)
LONG: Final = (16, 96, 128, 129, 256, 257, 300, 512, 513, 1025, 4096, 9000)
FLOATS: Final = (
    0.0,
    -0.0,
    0.5,
    1.0,
    -1.0,
    1e-320,
    1e308,
    -1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    1e-30,
    1e30,
    0.05,
    10.0,
)

OPENINGS: Final = (
    b"[",
    b'{"a":',
    b"- ",
    b"\x91",
    b"\x81\xa1a",
    b"\xdc\x04\x00",
    b"\xdd\x00\x00\xff\x00",
    b"\xdf\x00\x00\xff\x00",
)
"""Beginnings of what holds others, some with a claim to hold many: repeated, they nest."""

BYTE_SHARE: Final = 0.2
"""Of the changes: made to the bytes, whatever they mean."""


def another(rng: random.Random) -> Any:
    """A value of any kind."""
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            return rng.choice(BORDERS)
        case 4:
            return rng.choice(TEXTS)
        case 5:
            return "x" * rng.choice(LONG)
        case 6:
            return rng.choice(FLOATS)
        case 7:
            return rng.choice((None, True, False))
        case 8:
            return rng.randbytes(rng.randrange(20))
        case _:
            return rng.choice(([], {}, [0], [[]], [[0, 1]], {"a": 1}, {"": []}))


def changed_value(value: Any, rng: random.Random) -> Any:
    """One value near to another: of its kind as a rule, else of a kind that could be taken for it."""
    if rng.random() < 0.15:
        return another(rng)
    match value:
        case bool():
            return rng.choice((not value, int(value), str(value)))
        case int():
            choice = rng.randrange(8)
            if choice < 3:
                return value + rng.choice((-1, 1, -256, 256, 2, -2))
            if choice < 6:
                return rng.choice(BORDERS)
            return rng.choice(
                (-value, value * 2, value * 256, value // 2, value ^ (1 << rng.randrange(63)), str(value), float(value))
            )
        case float():
            return rng.choice((*FLOATS, value * 2, -value, int(value) if abs(value) < 1e15 else 0))
        case str():
            choice = rng.randrange(6)
            at = rng.randrange(len(value) + 1)
            if choice == 0:
                return value[:at] + rng.choice(TEXTS) + value[at:]
            if choice == 1:
                return value[:at] + value[at + 1 :]
            if choice == 2:
                return (value or "x") * rng.choice((2, 17, 129))
            if choice == 3:
                return rng.choice(TEXTS)
            if choice == 4:
                return value.encode("utf-8", "replace")
            return "x" * rng.choice(LONG)
        case bytes():
            return changed_bytes(value, rng)
        case _:
            return another(rng)


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of the tree with one to three changes in it."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tree = _changed_once(tree, rng)
    return tree


def _places(tree: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) of the tree."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in items:
        found.append((tree, key))
        if len(found) < 2000:
            _places(value, found)
    return found


def _changed_once(tree: Any, rng: random.Random) -> Any:
    places = _places(tree, [])
    if not places or rng.random() < 0.03:
        return _wrapped(tree, rng) if rng.random() < 0.5 else changed_value(tree, rng)
    holder, key = rng.choice(places)
    choice = rng.randrange(12)
    if choice < 5:
        value = holder[key]
        holder[key] = changed_value(value, rng) if not isinstance(value, list | dict) else _changed_size(value, rng)
    elif choice == 5:
        del holder[key]
    elif choice == 6:
        _insert(holder, key, copy.deepcopy(holder[key]), rng)
    elif choice == 7:
        _insert(holder, key, another(rng), rng)
    elif choice == 8:
        other, other_key = rng.choice(places)
        holder[key] = copy.deepcopy(other[other_key])
    elif choice == 9:
        holder[key] = _wrapped(holder[key], rng)
    elif choice == 10 and isinstance(holder, list):
        rng.shuffle(holder)
    else:
        holder[key] = another(rng)
    return tree


def _insert(holder: Any, key: Any, value: Any, rng: random.Random) -> None:
    if isinstance(holder, list):
        holder.insert(key, value)
    else:
        holder[f"{key}{rng.randrange(3)}" if isinstance(key, str) else rng.choice(BORDERS)] = value


def _wrapped(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 2, 8, 40))):
        value = [value] if rng.random() < 0.7 else {"a": value}
    return value


def _changed_size(value: Any, rng: random.Random) -> Any:
    if not value:
        return another(rng)
    if isinstance(value, list):
        choice = rng.randrange(4)
        if choice == 0:
            return value * rng.choice((2, 3, 17, 65))
        if choice == 1:
            return value[: rng.randrange(len(value))]
        if choice == 2:
            return value[rng.randrange(len(value)) :]
        return [*value, *value[: rng.randrange(1, len(value) + 1)]]
    return dict(list(value.items())[: rng.randrange(len(value))])


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a few of them changed, left out, repeated or put in."""
    edited = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(edited) + 1)
        match rng.randrange(8):
            case 0 if edited:
                edited[at % len(edited)] ^= 1 << rng.randrange(8)
            case 1 if edited:
                edited[at % len(edited)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0xDC, 0xDD, 0xC1, rng.randrange(256)))
            case 2:
                del edited[at : at + rng.choice((1, 1, 2, 8))]
            case 3:
                edited[at:at] = rng.randbytes(rng.choice((1, 1, 2, 8)))
            case 4:
                part = edited[at : at + rng.randrange(1, 32)]
                edited[at:at] = part * rng.choice((1, 1, 2, 50))
            case 5:
                number = rng.choice(BORDERS) % 2**64
                edited[at : at + 8] = number.to_bytes(8, rng.choice(("little", "big")))
            case 6:
                edited[at:at] = rng.choice(OPENINGS) * rng.choice((1, 3, 200, 2000))
            case _:
                del edited[at:]
    return bytes(edited)


def tree_mutator(
    decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], change: Callable[[Any, random.Random], Any] = changed_tree
) -> Callable[[bytes, random.Random], bytes]:
    """A `Target.mutate` that changes what the bytes mean, where they mean something, and now and then the bytes themselves.

    Args:
        decode: Bytes to a tree; may raise anything.
        encode: And back; may raise anything for what has no bytes.
    """

    def mutate(data: bytes, rng: random.Random) -> bytes:
        if rng.random() >= BYTE_SHARE:
            try:
                return encode(change(decode(data), rng))
            except Exception:  # bytes without a structure, or a change that the format cannot say
                pass
        return changed_bytes(data, rng)

    return mutate
