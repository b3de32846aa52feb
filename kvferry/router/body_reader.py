"""Parse the bodies of requests without blocking the router's loop.

Python's JSON parser holds the interpreter's lock until it returns, so a thread would block the loop, too. A costly body is
therefore parsed in a separate process, which runs this file. Job and body arrive on its standard input, and the answer goes to
its standard output.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvferry.router.api import ApiError
from kvferry.router.openai_body import check_body, load_body, parse_body

MAX_LIGHT_VALUES: Final = 200_000
"""Weight above which a separate process parses a body. The loop parses a lighter body in three turns, each of at most 50 ms of
CPU time, and a small one in one turn. 131,072 token ids are lighter."""

BYTES_PER_VALUE: Final = 16  # number of bytes that take as long to parse as a small integer
MAX_PROCESSES: Final = 2

_MARKS: Final = {b",": 1, b".": 1, b":": 3, b"[": 6, b"{": 6}
"""Cost of a value, a float's digits, a member, a list and an object after each mark, in small integers. Marks in texts count."""

SMALL_BYTES: Final = 56_000
_SMALL_NESTS: Final = 200
"""A body with at most so many bytes, objects and lists is light: n other bytes weigh at most 3.4 n (``1e11e1``)."""

_EXPONENT: Final = 10
_LIKE_NUMBERS: Final = bytes.maketrans(b"123456789+-E", b"00000000000e")  # an exponent then appears as 0e0

Made = TypeVar("Made")


def is_light(content: bytes) -> bool:
    """Return whether the loop may parse a body."""
    if len(content) <= SMALL_BYTES and content.count(b"[") + content.count(b"{") <= _SMALL_NESTS:
        return True
    left = MAX_LIGHT_VALUES - len(content) // BYTES_PER_VALUE
    if left < 0:
        return False
    left -= sum(weight * content.count(mark) for mark, weight in _MARKS.items())
    return left >= 0 and _EXPONENT * content.translate(_LIKE_NUMBERS).count(b"0e0") <= left


class BodyReader:
    """Parse bodies, at most `MAX_PROCESSES` costly ones at a time. Owned by one loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_PROCESSES)

    async def read(self, content: bytes, make: Callable[..., Made], *args: Any) -> Made:
        """Return `make(*args, body)`, where `body` is the object that `parse_body` returns.

        Args:
            content: The body as received.
            make: A function of a module. Its arguments and its result can be pickled.

        Raises:
            ApiError: The body is rejected.
        """
        if is_light(content):
            is_small = len(content) <= SMALL_BYTES  # each turn of the loop delays the request
            body = load_body(content)
            if not is_small:
                await asyncio.sleep(0)
            check_body(content, body)
            if not is_small:
                await asyncio.sleep(0)
            return make(*args, body)
        async with self._places:
            made = await _in_process(content, (make, args))
        if isinstance(made, ApiError):
            raise made
        return made  # type: ignore[no-any-return]


async def _in_process(content: bytes, job: object) -> Any:
    """Return the answer of a process. End the process if the call is cancelled."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", __name__, stdin=PIPE, stdout=PIPE)
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
        # A negative code is a signal, for example because memory is short.
        raise ApiError(503 if code < 0 else 500, f"the process that read the body ended with code {code}")
    return pickle.loads(answer)


def main() -> None:
    """Write the result of the job for the body, or the ApiError that rejects the body."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the router drains then, and needs the answer
        signal.signal(number, signal.SIG_IGN)
    make, args = pickle.load(sys.stdin.buffer)
    try:
        answer = make(*args, parse_body(sys.stdin.buffer.read()))
    except ApiError as error:
        answer = error
    pickle.dump(answer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
