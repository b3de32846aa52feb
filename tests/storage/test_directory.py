"""A directory as a store: whole pages or none, whatever happens to disks and processes."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.storage.stores import BROKEN, PAGE_BYTES, file_of, get, key_of, page_of, put
from transfer.errors import ConfigError
from transfer.storage import directory_room, envelope
from transfer.storage.base import USED_STEP_NS, Outcome
from transfer.storage.directory import DirectoryStore, check_directory
from transfer.storage.directory_room import KEEP_FRACTION, WRITING, DirectoryRoom
from transfer.storage.envelope import HEADER_BYTES

OK, MISSING, CORRUPT, FOREIGN, FAILED = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.FOREIGN, Outcome.FAILED
FILE_BYTES = PAGE_BYTES + HEADER_BYTES


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "kv")


def files(store: DirectoryStore) -> list[Path]:
    return sorted(path for path in Path(store.name).rglob("*") if path.is_file() and path.parent != Path(store.name))


def num_bytes(store: DirectoryStore) -> int:
    return sum(path.stat().st_size for path in files(store))


def counted(store: DirectoryStore) -> int:
    """Return the bytes that the processes of the directory have counted together."""
    return int.from_bytes((Path(store.name) / ".bytes").read_bytes(), "little")


def test_nobody_else_may_read_or_write_what_is_stored(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = DirectoryStore(tmp_path / "kv", max_bytes=1 << 30)
        put(store, 1)
    finally:
        os.umask(before)
    for path in (Path(store.name), *Path(store.name).rglob("*")):
        assert not path.stat().st_mode & 0o077, path


def test_a_page_that_is_stored_again_is_as_new_as_any(store: DirectoryStore) -> None:
    put(store, 1)
    (file,) = files(store)
    os.utime(file, ns=(1, 1))
    assert put(store, 1) == [OK] and file.stat().st_mtime_ns > 1


def break_file(store: DirectoryStore, how: str) -> None:
    (file,) = files(store)
    file.write_bytes(BROKEN[how](file.read_bytes()))


def test_a_page_that_was_cut_short_is_replaced_by_a_put(store: DirectoryStore) -> None:
    put(store, 1)
    break_file(store, "truncated")
    assert put(store, 1) == [OK]
    assert get(store, 1) is OK


def test_nodes_of_two_versions_leave_each_other_their_pages(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of an upgrade: what one of them cannot read is not broken."""
    put(store, 1)
    with monkeypatch.context() as upgraded:
        upgraded.setattr(envelope, "VERSION", envelope.VERSION + 1)
        assert get(store, 1) is FOREIGN
        assert put(store, 2) == [OK]
    assert [get(store, number) for number in (1, 2, 1)] == [OK, FOREIGN, OK]
    with monkeypatch.context() as upgraded:
        upgraded.setattr(envelope, "VERSION", envelope.VERSION + 1)
        assert get(store, 2) is OK


@pytest.mark.parametrize("max_bytes", [None, 1 << 30])
def test_a_file_that_is_being_written_is_left_alone(store: DirectoryStore, max_bytes: int | None) -> None:
    def put_again() -> None:
        """Into the same folder, by a process that has just begun."""
        assert store.delete([key_of(1)]) == [OK]
        assert put(DirectoryStore(Path(store.name), max_bytes=max_bytes), 1) == [OK]

    put(store, 1)
    (page,) = files(store)
    held, lost, young = (page.with_name(f"{WRITING}{name}") for name in ("held", "lost", "young"))
    for path in (held, lost, young):
        path.write_bytes(b"half a page")
    for path in (held, lost):
        os.utime(path, (1, 1))
    with held.open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        put_again()
        assert [path.exists() for path in (held, lost, young)] == [True, False, True]
    put_again()
    assert [path.exists() for path in (held, lost, young, page)] == [False, False, True, True]


@pytest.mark.parametrize("max_bytes", [None, 1 << 30])
def test_nobody_takes_a_page_away_that_is_being_written(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    """Another node begins to use the directory in the middle of every write, and is as quick as can be to clear up."""
    write, opened = os.write, []

    def write_beside_another(file: int, content: memoryview) -> int:
        opened.append(DirectoryRoom(Path(store.name), leftover_age_s=0.0, max_bytes=max_bytes))
        for path in files(store):
            opened[-1].prepare(path.parent)
        return write(file, content)

    monkeypatch.setattr(os, "write", write_beside_another)
    assert put(store, 1, 2) == [OK, OK]
    assert len(opened) == 4, "of header and page"
    assert [get(store, number) for number in (1, 2)] == [OK, OK]


def test_the_oldest_pages_make_room_and_what_was_read_is_not_old(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=8 * FILE_BYTES)
    assert put(store, *range(8)) == [OK] * 8
    for age, number in enumerate(range(8)):
        os.utime(file_of(store.name, key_of(number)), ns=(age + 1, age + 1))
    assert get(store, 0) is OK
    assert put(store, 8) == [OK]
    assert num_bytes(store) <= 8 * FILE_BYTES
    assert get(store, 1) is MISSING
    assert [get(store, number) for number in (0, 7, 8)] == [OK] * 3
    assert counted(store) == num_bytes(store) <= 8 * KEEP_FRACTION * FILE_BYTES + FILE_BYTES


@pytest.mark.parametrize("last_use", ["put", "put again", "get"])
def test_the_end_of_a_chain_makes_room_before_its_beginning(tmp_path: Path, last_use: str) -> None:
    """Without its beginning the rest of a chain would be found no more, and stay."""
    chain = range(16)
    store = DirectoryStore(tmp_path, max_bytes=16 * FILE_BYTES)
    if last_use != "put":
        put(store, *reversed(chain))
    if last_use == "get":
        assert store.get([(key_of(number), memoryview(bytearray(PAGE_BYTES))) for number in chain]) == [OK] * 16
    else:
        put(store, *chain)
    assert put(store, 99) == [OK], "one page over the limit"
    num_kept = int(16 * KEEP_FRACTION) - 1
    kept = [outcome is OK for outcome in store.exists([key_of(number) for number in (99, *chain)])]
    assert kept == [True] * (1 + num_kept) + [False] * (16 - num_kept)


def test_pages_count_as_used_when_their_caller_says(store: DirectoryStore) -> None:
    pages = [(key_of(number), memoryview(bytearray(page_of(number, PAGE_BYTES)))) for number in range(2)]
    for use, used_ns in ((store.put, 7_000_000), (store.put, 8_000_000), (store.get, 9_000_000)):
        for asked_ns in (used_ns, used_ns - 2_000_000):  # the last use counts, not the last report
            assert use(pages, used_ns=asked_ns) == [OK, OK]
            assert [file_of(store.name, key).stat().st_mtime_ns for key, _ in pages] == [used_ns, used_ns - USED_STEP_NS]


def test_a_page_above_the_limit_is_not_stored_and_takes_nothing_out(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=2 * FILE_BYTES)
    put(store, 1)
    assert put(store, 2, num_bytes=4 * PAGE_BYTES) == [FAILED]
    assert get(store, 1) is OK
    assert counted(store) == num_bytes(store)
    assert not [path for path in files(store) if path.name.startswith(WRITING)]


def test_what_is_deleted_or_broken_gives_its_room_back(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=100 * FILE_BYTES)
    put(store, 1, 2)
    store.delete([key_of(1)])
    assert counted(store) == FILE_BYTES
    break_file(store, "flipped")
    assert get(store, 2) is CORRUPT
    assert counted(store) == 0


def test_a_directory_that_has_grown_above_the_limit_is_cut_before_the_first_put(tmp_path: Path) -> None:
    put(DirectoryStore(tmp_path), *range(10))
    store = DirectoryStore(tmp_path, max_bytes=4 * FILE_BYTES)
    assert num_bytes(store) == 10 * FILE_BYTES, "nothing is looked at yet"
    assert put(store, 10) == [OK]
    assert num_bytes(store) == counted(store) == 3 * FILE_BYTES


def test_a_wrong_count_is_put_right(tmp_path: Path) -> None:
    """A machine that lost its power, or a version of tomorrow: the count is as wrong as it may be, and the limit holds."""
    store = DirectoryStore(tmp_path, max_bytes=4 * FILE_BYTES)
    put(store, 0, 1)
    for wrong in (b"", b"\xff" * 8, b"\x00" * 8, (2**62).to_bytes(8, "little")):
        (tmp_path / ".bytes").write_bytes(wrong)
        reopened = DirectoryStore(tmp_path, max_bytes=4 * FILE_BYTES)
        assert put(reopened, 2) == [OK]
        assert counted(reopened) == num_bytes(reopened) == 3 * FILE_BYTES
        reopened.delete([key_of(2)])
    (tmp_path / ".bytes").write_bytes((2**62).to_bytes(8, "little"))
    assert put(store, 2) == [OK]
    assert counted(store) == num_bytes(store) == 3 * FILE_BYTES


@pytest.mark.parametrize("lock", [".bytes", ".evicting"])
def test_a_lock_that_is_never_let_go_of_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lock: str) -> None:
    monkeypatch.setattr(directory_room, "LOCK_WAIT_S", 0.1)
    store = DirectoryStore(tmp_path, max_bytes=3 * FILE_BYTES)
    put(store, 0, 1, 2)
    with (tmp_path / lock).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert put(store, 3) == [FAILED], "there is no room for it, and none can be made"
        assert get(store, 1) is OK
        assert store.delete([key_of(0)]) == [OK]
    assert put(store, 3) == [OK]
    assert counted(store) == num_bytes(store) <= 3 * FILE_BYTES
    assert not [path for path in files(store) if path.name.startswith(WRITING)]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse larger files, as it does on a full disk. pytest writes no file meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        with capture_logs():
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_page_that_the_kernel_does_not_take_fails_and_leaves_nothing(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path, max_bytes=1 << 30)
    with files_of_at_most(PAGE_BYTES):
        pages = [(key_of(1), memoryview(page_of(1, PAGE_BYTES))), (key_of(2), memoryview(page_of(2, 16)))]
        assert store.put(pages) == [FAILED, OK]
    assert get(store, 2, 16) is OK
    assert len(files(store)) == 1
    assert counted(store) == num_bytes(store)


def test_a_directory_that_cannot_be_made_is_refused_when_it_is_checked(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"storage.directory is .*/file/kv; it must be a folder that this process can write"):
        check_directory(tmp_path / "file" / "kv")
    with pytest.raises(ConfigError, match=r"storage.directory is /proc/kv; it must be a folder"):
        check_directory(Path("/proc/kv"))


@pytest.mark.parametrize(("mode", "is_told"), [(0o700, False), (0o755, False), (0o770, True), (0o777, True), (0o1777, True)])
def test_a_directory_that_others_can_write_to_is_used_and_told(tmp_path: Path, mode: int, is_told: bool) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    directory.chmod(mode)
    with capture_logs() as lines:
        check_directory(directory)
    found = [(line["log_level"], line["mode"]) for line in lines if line["event"] == "store_writable_by_others"]
    assert found == ([("warning", f"{mode:#o}")] if is_told else [])


def test_a_directory_that_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    with capture_logs() as lines:
        check_directory(tmp_path / "kv")
    assert not lines and (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("max_bytes", [None, 1 << 30])
def test_a_store_whose_directory_cannot_be_made_fails_its_pages(tmp_path: Path, max_bytes: int | None) -> None:
    """And works when it can: a node's ranks are started again in whatever has become of it."""
    (tmp_path / "file").write_bytes(b"")
    store = DirectoryStore(tmp_path / "file" / "kv", max_bytes=max_bytes)
    assert put(store, 1) == [FAILED] == store.get([(key_of(1), memoryview(bytearray(64)))])
    (tmp_path / "file").unlink()
    assert put(store, 1) == [OK]


@pytest.mark.parametrize("max_bytes", [None, 1 << 30])
def test_a_directory_that_is_unmounted_is_not_made_on_the_disk_below(tmp_path: Path, max_bytes: int | None) -> None:
    store = DirectoryStore(tmp_path / "kv", max_bytes=max_bytes)
    assert put(store, 1) == [OK]
    shutil.rmtree(tmp_path / "kv")
    assert put(store, 2) == [FAILED] and not (tmp_path / "kv").exists()
    (tmp_path / "kv").mkdir()
    assert put(store, 3) == [OK] == put(store, 4)
