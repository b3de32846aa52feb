"""Whatever becomes of the store or of those who use it: tokens are right, waits are bounded, and what is broken is a miss."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.local_cluster.cluster import LocalCluster
from tests.cluster.calls import Caller, Reference, prompt, until, until_idle
from tests.cluster.conftest import Start
from tests.cluster.offload.clusters import (
    KEPT,
    PAGE,
    another_life,
    hits,
    number,
    spec,
    stored_files,
    unfinished_files,
    until_all_is_back,
)

pytestmark = pytest.mark.timeout(180)

LENGTH, NEW = 161, 4
WHOLE = LENGTH // PAGE
BEGINNING = 5
"""Pages of a prompt that are stored before the others, so that they are known."""

GET_TIMEOUT_S = 4.0  # what the store has comes within it on a slow machine, too
PAUSE_S = 0.3
STORE = {
    "storage.max_bytes": 4 << 30,  # more than there will be; with a limit all files are looked at before the first put
    "storage.get_timeout_s": GET_TIMEOUT_S,
    "storage.put_timeout_s": 20,
    "storage.breaker.pause_s": PAUSE_S,
    "storage.breaker.max_pause_s": PAUSE_S,
}
PAGE_FILE_BYTES = 8 * PAGE * 6 * 2 * 32 * 4  # 8 layers, the 6 KV heads of a rank, K and V of 32 float32


@pytest.fixture(scope="module")
def shared(model: Path, directory: Path, start: Start) -> Iterator[LocalCluster]:
    with start(spec(model, KEPT | STORE | {"storage.directory": directory}, tp_size=2, pool_tokens=1024)) as cluster:
        yield cluster


@pytest.fixture
async def cluster(shared: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Joined; afterwards nothing is held, whatever went on."""
    await shared.wait_joined()
    yield shared
    await until_all_is_back(shared.prefill, shared.decode)


def killed(cluster: LocalCluster) -> None:
    """The whole decode node is lost at once."""
    pids = (cluster.decode.pid, *cluster.decode.rank_pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    cluster.decode.reap(10)


async def relaunched(cluster: LocalCluster) -> None:
    cluster.launch("decode")
    await cluster.wait_joined()


async def check(cluster: LocalCluster, reference: Reference, token_ids: tuple[int, ...]) -> float:
    """Ask, check the tokens, and return the tokens of the prompt that came from the store."""
    before = await hits(cluster.decode, "storage")
    async with Caller(cluster.decode.address) as caller:
        reference.check(token_ids, await caller.ask(token_ids, NEW))
    return await hits(cluster.decode, "storage") - before


async def until_stored(
    cluster: LocalCluster, reference: Reference, token_ids: tuple[int, ...], are_there: Callable[[], bool]
) -> None:
    """Ask until all pages are in the store: one that could not be put there in time is tried again when it is found again."""

    async def are_there_now() -> bool:
        await check(cluster, reference, token_ids)
        await until_all_is_back(cluster.prefill, cluster.decode)
        return are_there()

    await until(are_there_now, "all its pages are stored", within_s=60)


async def put(
    cluster: LocalCluster, reference: Reference, directory: Path, token_ids: tuple[int, ...], *, known: int = 0
) -> set[Path]:
    """Ask, and return the files of its pages, of which so many leading ones were stored before."""
    before, num_new = set(stored_files(directory)), (len(token_ids) + NEW - 1) // PAGE - known
    await until_stored(cluster, reference, token_ids, lambda: len(stored_files(directory)) == len(before) + 2 * num_new)
    return set(stored_files(directory)) - before


async def stored(cluster: LocalCluster, reference: Reference, directory: Path, variant: int) -> tuple[tuple[int, ...], set[Path]]:
    """A prompt that the store has, and host memory has not; and its files, but for those of its beginning."""
    token_ids = prompt(LENGTH, variant)
    await put(cluster, reference, directory, token_ids[: BEGINNING * PAGE + 1])
    files = await put(cluster, reference, directory, token_ids, known=BEGINNING)
    await another_life(cluster)
    return token_ids, files


def of_rank(files: set[Path], rank: int) -> list[Path]:
    return sorted(path for path in files if path.name.endswith(f"-{rank}of2"))


def corrupt(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "rank"),
    [
        pytest.param(corrupt, 1, id="corrupt, of rank 1"),
        pytest.param(Path.unlink, 0, id="missing, of rank 0"),
    ],
)
async def test_a_bad_page_of_one_rank_is_a_miss_on_all(
    cluster: LocalCluster, reference: Reference, directory: Path, damage: Callable[[Path], None], rank: int
) -> None:
    """And it is put there again, so that the next life finds all of them."""
    variant = 10 + 2 * rank + [corrupt, Path.unlink].index(damage)  # type: ignore[list-item]
    token_ids, files = await stored(cluster, reference, directory, variant)
    bad = of_rank(files, rank)[3]
    damage(bad)
    found = await check(cluster, reference, token_ids)
    assert BEGINNING * PAGE <= found < WHOLE * PAGE and found % PAGE == 0
    await until_stored(cluster, reference, token_ids, lambda: all(path.exists() for path in files))
    await another_life(cluster)
    assert await check(cluster, reference, token_ids) == WHOLE * PAGE


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Anyone who reads the page waits for as long as the block lasts, and then finds nothing in it."""
    path.unlink()
    os.mkfifo(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # nobody reads
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        path.unlink(missing_ok=True)


async def test_a_store_that_hangs_costs_a_bounded_time(cluster: LocalCluster, reference: Reference, directory: Path) -> None:
    token_ids, files = await stored(cluster, reference, directory, 20)
    with hanging(of_rank(files, 1)[5]):
        begun_s = time.monotonic()
        assert await check(cluster, reference, token_ids) < WHOLE * PAGE
        assert GET_TIMEOUT_S < time.monotonic() - begun_s < GET_TIMEOUT_S + 30  # without a bound it were the caller's 60
        await until(lambda: has_run_out_of_time(cluster), "a get of rank 1 that ran out of time")
        other = prompt(70, 21)
        await check(cluster, reference, other)
    async with Caller(cluster.decode.address) as caller:
        reference.check(other, await caller.ask(other, NEW))


async def has_run_out_of_time(cluster: LocalCluster) -> bool:
    """Whether rank 1 has said that a get of its life ran out of time: it says so a second later at most."""
    return await number(cluster.decode, "kvferry_store_operations_total", op="get", outcome="timeout", rank="1") > 0


async def is_waiting_for_the_store(cluster: LocalCluster) -> bool:
    return await number(cluster.decode, "kvferry_offload_backup_queue") > 0


async def test_a_full_disk_stops_nobody(cluster: LocalCluster, reference: Reference, directory: Path) -> None:
    """Decoding goes on, pages are counted as failed, nothing half-written stays; when there is room again, it is used."""

    async def has_failed_more(before: float) -> bool:
        return await number(cluster.decode, "kvferry_offload_backups_total", outcome="failed") > before

    pids, before = cluster.decode.rank_pids, len(stored_files(directory))
    failed = await number(cluster.decode, "kvferry_offload_backups_total", outcome="failed")
    limits = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    for pid, (_, hard) in zip(pids, limits, strict=True):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (PAGE_FILE_BYTES // 2, hard))
    try:
        await check(cluster, reference, prompt(LENGTH, 30))
        await until_idle(cluster.prefill, cluster.decode)
        # Once a job has failed as a whole its pages and the others wait in host memory, and are tried a little later.
        await until(lambda: has_failed_more(failed), "a job has failed")
        await until(lambda: is_waiting_for_the_store(cluster), "pages wait to be stored")
        assert len(stored_files(directory)) == before
        await until(
            lambda: not unfinished_files(directory), "what could not be written is gone"
        )  # the next one may be written now
    finally:
        for pid, limit in zip(pids, limits, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

    variant = 200  # and on: no other test has these

    async def is_used_again() -> bool:
        nonlocal variant
        variant += 1
        await check(cluster, reference, prompt(40, variant))
        return len(stored_files(directory)) > before

    await until(is_used_again, "pages are stored again", within_s=60)


@pytest.mark.parametrize("who", ["a rank", "the node"])
async def test_killed_in_mid_backup(cluster: LocalCluster, reference: Reference, directory: Path, who: str) -> None:
    """What is half-written is never read, and goes; what is whole is of use."""
    for variant in range(5):  # where all is stored before the kill, another prompt is tried
        token_ids, before = prompt(1000, 40 + 5 * len(who) + variant), len(stored_files(directory))
        async with Caller(cluster.decode.address) as caller:
            caller.begin(token_ids, NEW)
            await until(lambda before=before: len(stored_files(directory)) > before, "some of its pages are stored")  # type: ignore[misc]
            if who == "a rank":
                await another_life(cluster)
            else:
                killed(cluster)
                await relaunched(cluster)
        if len(stored_files(directory)) < before + 2 * (len(token_ids) // PAGE):
            break
    else:
        raise AssertionError("no kill came in mid-backup")
    await check(cluster, reference, token_ids)
    await until_all_is_back(cluster.prefill, cluster.decode)
    for path in (directory / stored_files(directory)[0].parent / ".writing-of-the-killed", *unfinished_files(directory)):
        path.touch()
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    await another_life(cluster)
    assert await check(cluster, reference, token_ids) == (len(token_ids) - 1) // PAGE * PAGE
    await check(cluster, reference, prompt(40, 90 + len(who)))
    await until(lambda: not unfinished_files(directory), "what a killed writer left goes before the next one puts a page")
