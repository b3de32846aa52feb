"""How a process of a node is set up. Each setting lasts as long as a process, so the tests start new ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from node_runtime.process_setup import MIN_BYTES, THRESHOLD, TUNABLES, streaming_copies, tunables


def run(code: str, *arguments: str) -> str:
    """Return the output of a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


RAISE_LIMIT = """
import resource, sys
from node_runtime import process_setup
process_setup.MAX_OPEN_FILES = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
process_setup.raise_open_files()
process_setup.raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("most", "soft"), [(65_536, 2048), (1000, 1000), (100, 256)])
def test_the_soft_limit_is_raised_as_far_as_it_may_and_never_lowered(most: int, soft: int) -> None:
    assert run(RAISE_LIMIT, str(most)) == f"{soft} 2048"


def test_a_process_without_a_file_left_reports_its_open_files() -> None:
    """A client can take all files of a process. A rank that cannot read its own figures must not end."""
    code = """
import resource
from transfer.connector.rank_report import process_figures
assert set(process_figures()) == {"open_files", "threads", "resident_bytes"}
resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
print(process_figures())
"""
    assert run(code) == "{'open_files': 3}"


STEPS = """
import resource, sys, threading
from ctypes import CDLL, c_size_t, c_void_p, memset
from node_runtime.process_setup import keep_freed_memory
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


@pytest.mark.parametrize(
    ("blocks", "pages"),
    [
        pytest.param("(500 + 40 * number, 6)", 6 * (500 + 40 * 7) // 4, id="contexts grow"),
        pytest.param("(2 << 10, 40)", 40 * 512, id="more than a part of a thread's own heap"),
    ],
)
def test_a_step_gets_the_memory_of_the_step_before(blocks: str, pages: int) -> None:
    """`blocks` is the KiB of a block and their number; `pages` is the number of pages of the last of eight steps."""
    kept, left = (int(run(STEPS, mode, blocks)) for mode in ("keep", "leave"))
    assert kept < 2 * pages < 4 * pages < left, "page faults"


OURS = f"{THRESHOLD}={MIN_BYTES:#x}"
OTHER = "glibc.malloc.check=3"


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        (None, OURS),
        ("", OURS),
        (OTHER, f"{OTHER}:{OURS}"),
        (f"{THRESHOLD}=0x100000:{OTHER}", f"{THRESHOLD}=0x100000:{OTHER}"),
    ],
)
def test_tunables_that_are_set_already_stay(before: str | None, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    if before is not None:
        monkeypatch.setenv(TUNABLES, before)
    with streaming_copies():
        assert os.environ[TUNABLES] == inside
    assert os.environ.get(TUNABLES) == before


def test_glibc_accepts_the_value() -> None:
    """The loader itself prints the value that it uses."""
    loader = "/lib64/ld-linux-x86-64.so.2"
    if not os.path.exists(loader):
        pytest.skip("no glibc for x86-64 here")
    environment = {TUNABLES: tunables({})}
    done = subprocess.run([loader, "--list-tunables"], env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("this glibc cannot list its tunables (before 2.33)")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{THRESHOLD}:")]
    assert line.startswith(f"{THRESHOLD}: {MIN_BYTES:#x} ")
