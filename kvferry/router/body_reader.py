"""Reads the bodies of requests, none of them for long on the router's loop.

Python's JSON parser holds the interpreter's lock until it returns, so a thread would stop the loop, too. A body that takes long
is therefore read by a process of its own (`kvferry.router.body_process`).
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvferry.router.api import ApiError
from kvferry.router.openai_body import check_body, load_body

MAX_LIGHT_VALUES: Final = 200_000
"""A body that counts for more is read by a process of its own. The loop takes three turns over a body that counts for less, each
below 50 ms of processor time whatever the values are. 131,072 token ids count for less."""

BYTES_PER_VALUE: Final = 16  # take about as long as a small integer does
MAX_PROCESSES: Final = 2

_MARKS: Final = {b",": 1, b".": 1, b":": 3, b"[": 6, b"{": 6}
"""The number of small integers that take as long as what follows the mark: a value, the digits of a float, a member, a list, an
object. Marks inside a text count, too."""

_EXPONENT: Final = 10
_LIKE_NUMBERS: Final = bytes.maketrans(b"123456789+-E", b"00000000000e")  # by which a number with an exponent has 0e0 in it

Made = TypeVar("Made")


def is_light(content: bytes) -> bool:
    """Whether a body may be read on the loop."""
    left = MAX_LIGHT_VALUES - len(content) // BYTES_PER_VALUE
    if left < 0:
        return False
    left -= sum(weight * content.count(mark) for mark, weight in _MARKS.items())
    return left >= 0 and _EXPONENT * content.translate(_LIKE_NUMBERS).count(b"0e0") <= left


class BodyReader:
    """Reads bodies, at most `MAX_PROCESSES` costly ones at a time. Owned by one loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_PROCESSES)

    async def read(self, content: bytes, make: Callable[..., Made], *args: Any) -> Made:
        """Return `make(*args, body)`.

        Args:
            content: The body, as it came.
            make: A module's function, whose result can be pickled. Its last argument is the object that `parse_body` returns.
            args: Its other arguments, which can be pickled.

        Raises:
            ApiError: The body is refused.
        """
        if is_light(content):
            body = load_body(content)
            await asyncio.sleep(0)
            check_body(content, body)
            await asyncio.sleep(0)
            return make(*args, body)
        async with self._places:
            made = await _in_process(content, (make, args))
        if isinstance(made, ApiError):
            raise made
        return made  # type: ignore[no-any-return]


async def _in_process(content: bytes, job: object) -> Any:
    """The answer of a process. If nobody waits for it any more, the process is ended."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvferry.router.body_process", stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    try:
        process.stdin.write(pickle.dumps(job))
        answer, _ = await process.communicate(content)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    code = process.returncode
    if code:
        status, retry_after_s = (503, 1) if code < 0 else (500, None)  # below 0: a signal, as where memory is short
        raise ApiError(status, f"the process that read the body ended with code {code}", retry_after_s=retry_after_s)
    return pickle.loads(answer)
