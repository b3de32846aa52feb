"""A directory store under real processes: killed writers, and a limit that processes share."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.links import store_writer as writer
from tests.storage.stores import get, key_of
from transfer.storage.base import Outcome
from transfer.storage.directory import DirectoryStore
from transfer.storage.directory_room import WRITING
from transfer.storage.envelope import HEADER_BYTES

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
FILE_BYTES = writer.PAGE_BYTES + HEADER_BYTES


def start_writer(directory: Path, seed: int, *limit: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, writer.__file__, *map(str, (directory, seed, *limit))]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE)


def unfinished(directory: Path) -> int:
    return sum(path.name.startswith(WRITING) for path in directory.rglob("*"))


def test_a_killed_writer_leaves_whole_pages_or_none(tmp_path: Path) -> None:
    """Kill real processes at any moment of their puts: every key is whole or a miss, and the next store removes the rest."""
    chance = random.Random(7)
    found = {Outcome.OK: 0, Outcome.MISSING: 0}
    leftovers = 0
    for life in range(12):
        process = start_writer(tmp_path, life)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        time.sleep(chance.uniform(0, 0.03))  # any moment will do
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=60)
        process.stdout.close()
        leftovers += unfinished(tmp_path)
        store = DirectoryStore(tmp_path, leftover_age_s=0.0, max_bytes=1 << 40)
        others = [key_of(-1), key_of(-2 - life)]
        store.put([(key, memoryview(b"page")) for key in others])  # counts and sweeps everything first
        store.delete(others)
        assert not unfinished(tmp_path)
        for number in range(writer.NUM_PAGES):
            found[get(store, life * writer.NUM_PAGES + number, writer.PAGE_BYTES)] += 1
        assert {path.stat().st_size for path in tmp_path.glob("*/*/*")} <= {FILE_BYTES}
    assert found[Outcome.OK] and found[Outcome.MISSING], "killed neither before the first page nor behind the last"
    assert leftovers, "at least one was killed while it wrote"


def test_two_processes_stay_below_the_limit_together(tmp_path: Path) -> None:
    limit = 40 * FILE_BYTES
    processes = [start_writer(tmp_path, seed, limit) for seed in (1, 2)]
    try:
        most = 0
        while any(process.poll() is None for process in processes):
            most = max(most, used_bytes(tmp_path))
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=60)
            assert process.stdout is not None
            process.stdout.close()
    assert 0 < most <= limit
    store = DirectoryStore(tmp_path, max_bytes=limit)
    numbers = [seed * writer.NUM_PAGES + number for seed in (1, 2) for number in range(writer.NUM_PAGES)]
    assert 20 <= sum(get(store, number, writer.PAGE_BYTES) is Outcome.OK for number in numbers) <= 40


def used_bytes(directory: Path) -> int:
    """Return the size of all finished pages. No process evicts meanwhile, so no page counts whose successor counts too."""
    with (directory / ".evicting").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return sum(
            os.stat(os.path.join(folder, name)).st_size
            for folder, _, names in os.walk(directory)
            for name in names
            if not name.startswith(".")
        )
