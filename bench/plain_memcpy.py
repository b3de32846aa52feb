"""The yardstick of host copies: memcpy in a process of its own, with the C library as the system has it.

Ranks tell their C library to copy past the cache (`node_runtime.process_setup`), which makes memcpy itself faster. Measured in
one of them, the yardstick would grow with what it is to measure; both are reported.

    python -m bench.plain_memcpy NUM_BYTES      a line on stdin: three copies; their seconds on stdout
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np

from bench.timing import sample
from node_runtime.process_setup import TUNABLES

REPETITIONS = 3


class PlainMemcpy:
    """A process that copies when it is told to, and waits otherwise."""

    def __init__(self, num_bytes: int) -> None:
        environment = {name: value for name, value in os.environ.items() if name != TUNABLES}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.plain_memcpy", str(num_bytes)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def sample(self) -> list[float]:
        """Seconds of `REPETITIONS` copies.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None  # both are pipes
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that measures memcpy ended with exit code {self._process.wait()}")
        return [float(seconds) for seconds in answer.split()]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def memcpy_of(num_bytes: int) -> Callable[[], None]:
    """One copy of that many bytes, on one thread, between two places that were touched before."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    return lambda: np.copyto(target, source)


def main() -> None:
    copy_once = memcpy_of(int(sys.argv[1]))
    for _ in sys.stdin:
        print(*sample(copy_once, repetitions=REPETITIONS), flush=True)


if __name__ == "__main__":
    main()
