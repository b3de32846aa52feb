"""How much of a prompt is stored, in a few questions. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


async def first_false(has: Callable[[int], Awaitable[bool]], count: int) -> int:
    """The least number below `count` that `has` is false of, or `count`; `has` is true up to somewhere, and false from there on.

    First and last go first: most prompts are all new or all old. A `has` that is false of everything once there is no time left
    gives what is known by then.
    """
    if not count or not await has(0):
        return 0
    if await has(count - 1):
        return count
    low, high = 0, count - 1  # has(low), and not has(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if await has(middle) else (low, middle)
    return high
