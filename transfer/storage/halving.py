"""Find how much of a prompt is stored with few questions. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


async def first_false(has: Callable[[int], Awaitable[bool]], count: int) -> int:
    """Return the least number below `count` for which `has` is false, or `count`. `has` is true before it and false after it.

    Ask for the first and the last number first, because most prompts are all new or all old. If `has` is false for everything
    once time is up, the result is what is known by then.
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
