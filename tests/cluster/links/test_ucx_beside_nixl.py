"""Two UCX libraries in one process: the ucx transport's, and the one that NIXL brings.

Each case has a process of its own: which library was loaded first is what matters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# Writes are on their way when the target leaves; a UCX without its registration cache then follows a null pointer.
CODE = """
import sys
from tests.transport.contract import open_pair
from tests.transport.payload import rng
whole = rng(0, 1 << 20)
for kind in sys.argv[1:]:
    pair = open_pair(kind)
    pair.move(whole, whole, 1)
    pair.writer.write(pair.source_memory, whole, whole, 2)
    pair.target.close()
    pair.turn(50)
    pair.close()
    print(kind, flush=True)
"""


def run(kinds: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CODE, *kinds], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "kinds",
    [["ucx-shm", "nixl-net", "ucx-shm", "nixl-shm"], ["ucx-net", "nixl-shm", "ucx-net"], ["nixl-shm", "ucx-net", "nixl-net"]],
    ids="-".join,
)
def test_neither_takes_the_memory_hooks_from_the_other(kinds: list[str]) -> None:
    done = run(kinds, {"UCX_LOG_LEVEL": "diag"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line in kinds] == kinds
    assert "registration cache" not in done.stdout  # "could not create UCP registration cache"


@pytest.mark.parametrize("environment", [{"UCX_MEM_EVENTS": "n"}, {"UCX_MEM_EVENTS": "n", "UCX_RCACHE_ENABLE": "n"}], ids=str)
def test_ucx_without_memory_hooks_is_refused(environment: dict[str, str]) -> None:
    done = run(["ucx-net"], environment)
    assert done.returncode == 1
    assert "its registration cache needs its memory hooks: take UCX_MEM_EVENTS" in done.stderr.splitlines()[-1]
