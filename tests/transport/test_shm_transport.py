"""The transport over shared memory in this process: how a mapping ends, and the files that a writer rejects."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import platform
import re
import signal
import struct
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transfer.errors import ConfigError, LocalProtocolError, PeerUnreachable, TransportClosed
from transfer.pool.staging import StagingBuffer, zeroed_bytes
from transfer.transport.base import ByteRange
from transfer.transport.liveness import LivenessPipe
from transfer.transport.mapped_blob import MappedPlace, Offered
from transfer.transport.registered_memory import DeviceBuffer
from transfer.transport.shared_memory import SEALS, map_shared, region_of, shared_memory
from transfer.transport.shm import ShmTransport
from transfer.transport.shm_blob import ShmAnswer

SIZE = 1 << 20


def rng(begin: int, end: int) -> ByteRange:
    return ByteRange(begin=begin, end=end)


class Pair:
    """Both ends in this process."""

    def __init__(self) -> None:
        self.writer_transport, self.target_transport = ShmTransport(), ShmTransport()
        self.source, self.ring = StagingBuffer(SIZE), StagingBuffer(SIZE, is_shared=True)
        self.source.tensor.copy_(torch.arange(SIZE).to(torch.uint8))
        self.source_memory = self.writer_transport.register(self.source.tensor)
        self.ring_memory = self.target_transport.register(self.ring.tensor)

    def attach(self) -> tuple[Any, Any]:
        offer = self.writer_transport.offer()
        target, answer = self.target_transport.accept(offer.blob, self.ring_memory)
        return offer.complete(answer), target

    def close(self) -> None:
        self.writer_transport.close()
        self.target_transport.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    gc.collect()  # descriptors of earlier tests, whose exceptions are in cycles with their frames
    made = Pair()
    yield made
    made.close()


def ends_within(session: Any, seconds: float = 60.0) -> bool:
    """A new session's mapping is prepared on a thread, which keeps it for that long."""
    ends_at = time.monotonic() + seconds
    while not session.has_ended and time.monotonic() < ends_at:
        time.sleep(0.001)
    return bool(session.has_ended)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings(inode: int) -> int:
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


# How a mapping ends


def test_a_gather_under_way_keeps_the_mapping_and_the_quarantine(pair: Pair) -> None:
    """Its bytes still land after both ends have closed: the ring may be reused only when nothing can store into it any more."""
    region = region_of(pair.ring.tensor.data_ptr(), SIZE)
    assert region is not None
    before = num_descriptors()
    writer, target = pair.attach()
    out = writer.direct(rng(100, 200))
    writer.close()
    target.close()
    with pytest.raises(LocalProtocolError, match="may still reach it; close the session and wait until it is over"):
        pair.target_transport.deregister(pair.ring_memory)
    part = out[50:]
    del out
    part.fill_(9)
    assert pair.ring.tensor[150:200].eq(9).all() and int(pair.ring.tensor.sum()) == 9 * 50
    assert not target.is_over and not writer.has_ended
    del part
    assert ends_within(writer) and target.is_over
    assert num_mappings(region.inode) == 1, "the target's own"
    assert num_descriptors() == before
    pair.target_transport.deregister(pair.ring_memory)


def test_closing_drops_the_rest_of_a_write(pair: Pair) -> None:
    writer, target = pair.attach()
    handle = writer.write(pair.source_memory, rng(0, SIZE), rng(0, SIZE), 1)
    writer.close()
    with pytest.raises(TransportClosed, match="was closed while key 1 was pending"):
        handle.poll()
    assert writer.direct(rng(0, 1)) is None and writer.progress() is False
    target.close()
    assert ends_within(target) and not pair.ring.tensor.any()
    pair.writer_transport.deregister(pair.source_memory)


def test_a_child_process_of_the_writer_has_no_mapping(pair: Pair) -> None:
    region = region_of(pair.ring.tensor.data_ptr(), SIZE)
    assert region is not None
    writer, _ = pair.attach()
    assert num_mappings(region.inode) == 2
    child = os.fork()
    if child == 0:
        os._exit(num_mappings(region.inode))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1, "the ring that its parent has as a target, and no peer's"
    assert writer.direct(rng(0, 1)) is not None


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has numbers of system calls of x86_64")
def test_without_the_advice_not_to_fork_it_nothing_is_mapped() -> None:
    """A child that inherits the mapping could store into a ring that was given to another writer."""
    fd = memfd(4096, SEALS)
    inode = os.fstat(fd).st_ino
    child = os.fork()
    if child == 0:
        code = 100
        try:
            refuse_advice(mmap.MADV_DONTFORK)
            map_shared(fd, 4096, lambda: None)
        except PermissionError:
            code = num_mappings(inode)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(fd)


def refuse_advice(advice: int) -> None:
    """Let the kernel refuse one advice of madvise to this process from now on, with EPERM."""
    return_errno, return_allow, load, jump_if_equal, return_ = 0x00050000, 0x7FFF0000, 0x20, 0x15, 0x06
    madvise, number_at, third_argument_at = 28, 0, 32
    code = b"".join(
        struct.pack("HBBI", *line)
        for line in (
            (load, 0, 0, number_at),
            (jump_if_equal, 0, 3, madvise),
            (load, 0, 0, third_argument_at),
            (jump_if_equal, 0, 1, advice),
            (return_, 0, 0, return_errno | errno.EPERM),
            (return_, 0, 0, return_allow),
        )
    )
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None)
    set_no_new_privs, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(set_no_new_privs, 1, 0, 0, 0) == 0 and libc.prctl(set_seccomp, filter_mode, program) == 0


def test_a_ring_is_freed_with_its_last_view() -> None:
    before = num_descriptors()
    ring = zeroed_bytes(SIZE, is_shared=True)
    region = region_of(ring.data_ptr() + 10, SIZE - 10)
    assert region is not None and num_mappings(region.inode) == 1
    address = ring.data_ptr()
    part = ring[5:]
    del ring
    assert region_of(address, 1) == region
    del part
    assert region_of(address, 1) is None and num_mappings(region.inode) == 0
    assert num_descriptors() == before


def test_a_region_is_found_while_other_memory_ends() -> None:
    """As on another thread, or by the garbage collector: an attach must not fail because the ring of another session goes."""
    others = [shared_memory(4096) for _ in range(3)]

    class Address(int):
        def __ge__(self, other: int) -> bool:
            others.clear()
            return int(self) >= other

    assert region_of(Address(1), 1) is None and not others


def test_no_process_can_change_the_size_of_a_ring() -> None:
    """A store beyond the end of a file kills the process that makes it."""
    ring = zeroed_bytes(SIZE, is_shared=True)
    region = region_of(ring.data_ptr(), SIZE)
    assert region is not None
    for num_bytes in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, num_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


# Rejected memory


def test_memory_that_cannot_be_offered(pair: Pair) -> None:
    memory = pair.target_transport.register(torch.zeros(8, dtype=torch.uint8))
    before = num_descriptors()
    offer = pair.writer_transport.offer()
    with pytest.raises(ConfigError, match=r"memory of 8 bytes cannot be offered over transport shm.*is_shared=True"):
        pair.target_transport.accept(offer.blob, memory)
    offer.close()
    assert num_descriptors() == before


def test_memory_of_a_gpu_is_refused(pair: Pair) -> None:
    on_device = DeviceBuffer(owner=None, address=4096, num_bytes=8, device_index=0)
    buffer = SimpleNamespace(device=SimpleNamespace(index=0), __cuda_array_interface__=on_device.__cuda_array_interface__)
    with pytest.raises(ConfigError, match="transport shm moves host memory, and this is memory of a GPU"):
        pair.writer_transport.register(buffer)


def signed_answer(offer: Any, line: LivenessPipe, *, fd: int, inode: int) -> bytes:
    """As a target writes it that names any file of its process."""
    token = Offered.from_blob(offer.blob, transport="shm").token
    place = MappedPlace(line=line.address, token=token, offset=0, num_bytes=SIZE)
    answer = ShmAnswer(place=place, fd=fd, inode=inode).to_blob()
    line.sign(answer)
    return answer


def memfd(num_bytes: int, seals: int) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def half_a_memfd(num_bytes: int) -> int:
    """Only its second half has pages."""
    fd = memfd(num_bytes, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.posix_fallocate(fd, num_bytes // 2, num_bytes // 2)
    return fd


def memfd_in_huge_pages() -> int:
    """It needs no huge page until a page of it is touched."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    os.ftruncate(fd, 2 << 20)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def memfd_with_a_lease() -> int:
    """For 45 s, or until its owner gives the lease up, a call that opens the file waits."""
    made = memfd(SIZE, SEALS)
    fd = os.open(f"/proc/self/fd/{made}", os.O_RDWR)  # leases are for files that were opened by a path
    os.close(made)
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # by default the kernel asks the owner with a signal that ends it
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    return fd


def opened_pipe() -> int:
    return os.pipe()[0]


def opened_file() -> int:
    return os.open(__file__, os.O_RDONLY)


@pytest.mark.parametrize(
    ("open_fd", "reason"),
    [
        (opened_pipe, "is not memory, or is in huge pages"),
        (lambda: os.open("/dev/null", os.O_RDWR), "is not memory, or is in huge pages"),
        (lambda: os.open("/", os.O_RDONLY), "is not memory, or is in huge pages"),
        (opened_file, "is not memory, or is in huge pages"),
        (memfd_in_huge_pages, "is not memory, or is in huge pages"),
        (lambda: memfd(SIZE, 0), "is not memory of a fixed size"),
        (lambda: memfd(SIZE, fcntl.F_SEAL_GROW), "is not memory of a fixed size"),
        (lambda: memfd(SIZE - 1, SEALS), f"has {SIZE - 1} bytes; its answer offers bytes up to {SIZE}"),
        (lambda: half_a_memfd(2 * SIZE), f"has {2 * SIZE} bytes; its answer offers bytes up to {SIZE}"),
        (lambda: memfd(SIZE, SEALS), f"has 0 allocated bytes; its answer offers bytes up to {SIZE}"),
        (memfd_with_a_lease, r"cannot be opened for writing \(Resource temporarily unavailable\)"),
        (lambda: -1, r"cannot be opened \(No such file or directory\)"),
    ],
)
def test_a_file_that_is_no_ring_is_rejected_by_name(pair: Pair, open_fd: Any, reason: str) -> None:
    """A hostile target names any file of its process: nothing of it is changed, read or mapped."""
    offer = pair.writer_transport.offer()
    fd = open_fd()
    named_fd, inode = (fd, os.fstat(fd).st_ino) if fd >= 0 else (2**31 - 1, 1)
    line = LivenessPipe()
    hostile = signed_answer(offer, line, fd=named_fd, inode=inode)
    before = num_descriptors()
    with pytest.raises((ConfigError, PeerUnreachable), match=f"descriptor {named_fd} of peer process {os.getpid()} {reason}"):
        offer.complete(hostile)
    assert num_descriptors() == before
    line.end()
    _, good = pair.target_transport.accept(offer.blob, pair.ring_memory)
    offer.complete(good).close()
    if fd >= 0:
        os.close(fd)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fd": -1}, "field fd of the peer's blob is -1; expected a number in [0, 2**31)"),
        ({"fd": 2**31}, "field fd of the peer's blob is 2147483648; expected a number in [0, 2**31)"),
        ({"inode": 0}, "field inode of the peer's blob is 0; expected a number in [1, 2**64)"),
        ({"fd": "1"}, "field fd of the peer's blob is str; expected int"),
    ],
)
def test_fields_of_another_kind_are_rejected(pair: Pair, changes: dict[str, Any], reason: str) -> None:
    offer = pair.writer_transport.offer()
    _, blob = pair.target_transport.accept(offer.blob, pair.ring_memory)
    good = ShmAnswer.from_blob(blob, token=Offered.from_blob(offer.blob, transport="shm").token)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        offer.complete(replace(good, **changes).to_blob())
    offer.close()


def test_the_inode_tells_a_descriptor_that_was_used_again(pair: Pair) -> None:
    other = torch.frombuffer(shared_memory(SIZE), dtype=torch.uint8)
    region = region_of(other.data_ptr(), SIZE)
    assert region is not None
    offer, line = pair.writer_transport.offer(), LivenessPipe()
    with pytest.raises(ConfigError, match="is not the memory in its answer"):
        offer.complete(signed_answer(offer, line, fd=region.fd, inode=region.inode + 1))
    offer.close()
    line.end()


def test_a_peer_cannot_name_memory_of_another_process(pair: Pair) -> None:
    """A peer anywhere knows the writer's own process and pipe from the offer, and those of targets from their answers."""
    region = region_of(pair.ring.tensor.data_ptr(), SIZE)
    assert region is not None
    offer = pair.writer_transport.offer()
    offered = Offered.from_blob(offer.blob, transport="shm")
    place = MappedPlace(line=offered.line, token=offered.token, offset=0, num_bytes=SIZE)
    before = num_descriptors()
    with pytest.raises(PeerUnreachable, match=f"process {os.getpid()} is gone, or did not write the answer that names it"):
        offer.complete(ShmAnswer(place=place, fd=region.fd, inode=region.inode).to_blob())
    assert num_descriptors() == before
    other = shared_memory(SIZE)
    other_region = region_of(ctypes.addressof(ctypes.c_char.from_buffer(other)), SIZE)
    assert other_region is not None
    target, answer = pair.target_transport.accept(offer.blob, pair.ring_memory)
    honest = ShmAnswer.from_blob(answer, token=offered.token)
    with pytest.raises(PeerUnreachable, match="is gone, or did not write the answer that names it"):
        offer.complete(replace(honest, fd=other_region.fd, inode=other_region.inode).to_blob())
    with pytest.raises(PeerUnreachable, match="is gone, or did not write the answer that names it"):
        offer.complete(answer)  # the pipe holds its proof once
    offer.close()
    target.close()


def test_a_target_that_closed_before_the_writer_completed(pair: Pair) -> None:
    offer = pair.writer_transport.offer()
    target, answer = pair.target_transport.accept(offer.blob, pair.ring_memory)
    target.close()
    with pytest.raises(PeerUnreachable, match="closed"):
        offer.complete(answer)
    offer.close()
    assert target.is_over
