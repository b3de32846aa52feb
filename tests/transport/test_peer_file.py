"""Files that a peer names: an attach asks no other process for their attributes, so none can keep it waiting."""

from __future__ import annotations

import enum
import errno
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.transport.test_shm_transport import Pair, num_descriptors, signed_answer
from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.liveness import LivenessPipe, PeerPipe
from transfer.transport.peer_file import mount_of, open_place

_LIMIT_S: Final = 60.0
_REQUEST: Final = struct.Struct("<IIQQ")  # length, operation, number, node
_ROOT, _FILE = 1, 7


class Operation(enum.IntEnum):
    """Of the kernel's FUSE protocol, include/uapi/linux/fuse.h."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    STATFS = 17
    RELEASE = 18
    FLUSH = 25
    INIT = 26


def attributes(node: int) -> bytes:
    mode = 0o40700 if node == _ROOT else 0o100600
    return struct.pack("<QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, os.getuid(), os.getgid(), 0, 4096, 0)


def answer_to(operation: int, node: int) -> bytes | None:
    """Return the body of an answer. None means an operation that the file system does not know."""
    match operation:
        case Operation.INIT:
            return struct.pack("<IIIIHHII32x", 7, 31, 0, 0, 0, 0, 4096, 0)
        case Operation.LOOKUP:
            return struct.pack("<QQQQII", _FILE, 0, 0, 0, 0, 0) + attributes(_FILE)  # kept for no time
        case Operation.GETATTR:
            return struct.pack("<QII", 0, 0, 0) + attributes(node)  # kept for no time
        case Operation.OPEN:
            return bytes(16)
        case Operation.STATFS:
            return bytes(80)
        case Operation.RELEASE | Operation.FLUSH:
            return b""
    return None


class FuseFiles:
    """A file system of one file, mounted at `folder` and served by a thread of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[int] = []
        """Operations that the kernel asked for, in order."""
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        mounted = subprocess.run(
            ["mount", "-i", "-t", "fuse", "-o", options, "one-file", str(folder)],
            pass_fds=[self._device], capture_output=True, text=True, timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        if mounted.returncode != 0:
            os.close(self._device)
            pytest.skip(f"FUSE cannot be mounted here, which needs root: {mounted.stderr.strip()}")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True, timeout=_LIMIT_S)
        self._thread.join(_LIMIT_S)
        os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 20)
            except OSError:  # unmounted
                return
            _, operation, number, node = _REQUEST.unpack_from(request)
            self.asked.append(operation)
            if operation != Operation.FORGET:  # which expects no answer
                body = answer_to(operation, node)
                header = struct.pack("<IiQ", 16 + len(body or b""), -errno.ENOSYS if body is None else 0, number)
                os.write(self._device, header + (body or b""))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FuseFiles]:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse is missing, or may not be opened")
    made = FuseFiles(tmp_path)
    yield made
    made.close()


@pytest.fixture
def fuse_fd(files: FuseFiles) -> Iterator[int]:
    fd = os.open(files.folder / "file", os.O_RDONLY | os.O_CLOEXEC)
    yield fd
    os.close(fd)


def asked_by_a_look(files: FuseFiles, fd: int) -> list[int]:
    """Return what was asked before this call; check that a look at the attributes asks the file system."""
    before = list(files.asked)
    os.fstat(fd)
    assert files.asked == [*before, Operation.GETATTR]
    return before


def test_a_file_that_another_process_serves_is_rejected_without_asking_it(files: FuseFiles, fuse_fd: int) -> None:
    """Else that process stops the loop of a rank, or the file system of a remote host that is away."""
    pair = Pair()
    offer, line = pair.writer_transport.offer(), LivenessPipe()
    hostile = signed_answer(offer, line, fd=fuse_fd, inode=_FILE)
    asked, before = list(files.asked), num_descriptors()
    with pytest.raises(ConfigError, match=f"descriptor {fuse_fd} of peer process {os.getpid()} is not memory"):
        offer.complete(hostile)
    with pytest.raises(PeerUnreachable, match="is not its liveness pipe"):
        PeerPipe(replace(line.address, fd=fuse_fd, inode=_FILE))
    assert num_descriptors() == before
    assert asked_by_a_look(files, fuse_fd) == asked
    line.end()
    offer.close()
    pair.close()


def test_a_descriptor_that_is_replaced_meanwhile_is_rejected_without_asking_its_server(
    files: FuseFiles, fuse_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process can replace its descriptor between a look at it and the call that opens it."""
    own = os.memfd_create("replaced")
    mount_id, asked, before = mount_of(own), list(files.asked), num_descriptors()
    open_file = os.open

    def open_after_replacing(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if path == f"/proc/{os.getpid()}/fd/{own}":
            os.dup2(fuse_fd, own)
        return open_file(path, flags, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_after_replacing)
        assert open_place(os.getpid(), own, mount_id=mount_id) is None
    assert mount_of(own) == mount_of(fuse_fd) != mount_id, "it was replaced"
    assert num_descriptors() == before
    assert asked_by_a_look(files, fuse_fd) == asked
    os.close(own)
