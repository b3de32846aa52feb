"""A process that computes on CPUs keeps the memory that a step gives back; asked of real processes, by their page faults."""

from __future__ import annotations

import subprocess
import sys

STEPS = """
import resource, sys, threading
from ctypes import CDLL, c_size_t, c_void_p, memset
from node_runtime.allocator import keep_freed_memory
libc = CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = c_void_p, [c_size_t], [c_void_p]
def steps():
    for number in range(40):  # of contexts that grow
        num_bytes = (500 + 20 * number) << 10
        blocks = [libc.malloc(num_bytes) for _ in range(6)]
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
PAGES_OF_THE_LAST_STEP = 6 * (500 + 20 * 39) // 4


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", STEPS, mode], capture_output=True, text=True, timeout=60, check=True)
    return int(done.stdout)


def test_a_step_gets_the_memory_of_the_step_before() -> None:
    assert faults("keep") < 2 * PAGES_OF_THE_LAST_STEP < 10 * PAGES_OF_THE_LAST_STEP < faults("leave")
