"""Steps of a process that computes on CPUs reuse freed memory. Real processes count their page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """
import resource, sys, threading
from ctypes import CDLL, c_size_t, c_void_p, memset
from node_runtime.allocator import keep_freed_memory
libc = CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [c_size_t], [c_void_p]
def steps():
    for number in range(8):
        num_kib, num_blocks = eval(sys.argv[2])
        num_bytes = num_kib << 10
        blocks = [libc.malloc(num_bytes) for _ in range(num_blocks)]
        for block in blocks:
            memset(block, 1, num_bytes)
        for block in blocks:
            libc.free(block)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
thread = threading.Thread(target=steps)  # as an engine has one
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, blocks: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, mode, blocks], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    ("blocks", "pages"),
    [
        pytest.param("(500 + 40 * number, 6)", 6 * (500 + 40 * 7) // 4, id="contexts grow"),
        pytest.param("(2 << 10, 40)", 40 * 512, id="more than a part of a thread's own heap"),
    ],
)
def test_a_step_gets_the_memory_of_the_step_before(blocks: str, pages: int) -> None:
    """`blocks` is the KiB of a block and their number; `pages` is the number of pages of the last of eight steps."""
    assert faults("keep", blocks) < 2 * pages < 4 * pages < faults("leave", blocks)
