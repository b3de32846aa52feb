"""The identity of the other end: the blobs of the data plane's handshake, and the proof that two ends share a host.

A blob travels inside Attach, from the writer to the target and back. It is a small map in msgpack, with its transport and
version, and with a checksum, because native libraries parse the addresses in it unchecked.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from transfer.errors import ConfigError

_MAX_BLOB_BYTES = 64 * 1024  # a UCX worker address on an eight-NIC host is about 2 KiB
_MAX_ENTRIES = 32  # limit of each list and map, also nested: the unpacker allocates as many entries as a blob claims
_LIMITS = {"max_array_len": _MAX_ENTRIES, "max_map_len": _MAX_ENTRIES, "max_ext_len": 0}
_PROOF_BYTES = 16
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Names one process among all hosts and containers."""

    host: str
    boot_id: str
    pid_namespace: int
    pid: int

    def __post_init__(self) -> None:
        for name, kind in (("host", str), ("boot_id", str), ("pid_namespace", int), ("pid", int)):
            value = getattr(self, name)
            if type(value) is not kind:
                raise ConfigError(f"{name} {value!r} of a process identity is not of type {kind.__name__}")

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
        return cls(
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
            pid=os.getpid(),
        )

    def shares_kernel_with(self, other: ProcessIdentity) -> bool:
        """Return whether both run under one kernel and see each other's process ids."""
        return (self.boot_id, self.pid_namespace) == (other.boot_id, other.pid_namespace)

    def is_on_machine_of(self, other: ProcessIdentity) -> bool:
        """Return whether both run under one kernel, perhaps in different containers."""
        return self.boot_id == other.boot_id

    def to_wire(self) -> list[str | int]:
        return [self.host, self.boot_id, self.pid_namespace, self.pid]

    @classmethod
    def from_wire(cls, value: object) -> ProcessIdentity:
        """Read the result of `to_wire`.

        Raises:
            ConfigError: The value has another shape.
        """
        if not isinstance(value, list) or len(value) != 4:
            raise ConfigError(f"process identity {value!r} is not a list of host, boot id, pid namespace and pid")
        return cls(host=value[0], boot_id=value[1], pid_namespace=value[2], pid=value[3])


class ReadableProof:
    """Random bytes in this process that a peer reads to prove that it can read this process's memory directly."""

    def __init__(self) -> None:
        self._bytes = secrets.token_bytes(_PROOF_BYTES)
        self._buffer = ctypes.create_string_buffer(self._bytes, _PROOF_BYTES)

    def to_wire(self) -> list[Any]:
        return [ctypes.addressof(self._buffer), self._bytes]


def can_read_memory_of(pid: int, proof: object) -> bool:
    """Return whether this process may read the memory of process `pid`: same kernel, same user, ptrace scope, seccomp.

    Source: process_vm_readv(2); UCX's `cma` transport makes the same call.
    """
    if not isinstance(proof, list) or len(proof) != 2:
        return False
    address, expected = proof
    if type(address) is not int or not 0 < address < 2**64 or not isinstance(expected, bytes) or len(expected) != _PROOF_BYTES:
        return False
    if not 0 < pid < 2**31:
        return False
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        return False
    read.restype = ctypes.c_ssize_t
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    found = ctypes.create_string_buffer(_PROOF_BYTES)
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(found), _PROOF_BYTES)
    remote = (ctypes.c_uint64 * 2)(address, _PROOF_BYTES)
    return int(read(pid, local, 1, remote, 1, 0)) == _PROOF_BYTES and found.raw == expected


def pack_blob(transport: str, version: int, role: str, fields: dict[str, Any]) -> bytes:
    """Write one handshake blob; `role` is "offer" or "answer"."""
    body = msgpack.packb(fields)
    return bytes(msgpack.packb([transport, version, role, zlib.crc32(body), body]))


def blob_transport(blob: bytes) -> str:
    """Return the name of the transport in a handshake blob; empty if it has none."""
    try:
        envelope = msgpack.unpackb(blob[:_MAX_BLOB_BYTES], **_LIMITS)
    except Exception:  # see `unpack_blob`, which reports it
        return ""
    return envelope[0] if isinstance(envelope, list) and envelope and isinstance(envelope[0], str) else ""


def unpack_blob(blob: bytes, *, transport: str, version: int, role: str) -> dict[str, Any]:
    """Read one handshake blob.

    Raises:
        ConfigError: It is not of this transport, version and role. One line names both.
    """
    wanted = f"a kvferry {role} of transport {transport} version {version}"
    if len(blob) > _MAX_BLOB_BYTES:
        raise ConfigError(f"blob of {len(blob)} bytes is not {wanted}: at most {_MAX_BLOB_BYTES} bytes")
    try:
        envelope = msgpack.unpackb(blob, **_LIMITS)
    except Exception as error:  # msgpack raises ValueError, its own errors and, on deep nesting, others
        raise ConfigError(f"blob of {len(blob)} bytes is not {wanted}: not msgpack") from error
    kinds = (str, int, str, int, bytes)
    if not isinstance(envelope, list) or [type(item) for item in envelope] != list(kinds):
        raise ConfigError(f"blob of {len(blob)} bytes is not {wanted}: its envelope has another shape")
    found_transport, found_version, found_role, checksum, body = envelope
    if (found_transport, found_version, found_role) != (transport, version, role):
        found = f"{found_role[:16]!r} of transport {found_transport[:32]!r} version {found_version}"
        raise ConfigError(f"peer sent a kvferry {found}; this end needs {wanted}: choose the same transport on both sides")
    if zlib.crc32(body) != checksum:
        raise ConfigError(f"blob of {len(blob)} bytes is not {wanted}: its checksum is wrong")
    try:
        fields = msgpack.unpackb(body, **_LIMITS)
    except Exception as error:
        raise ConfigError(f"blob of {len(blob)} bytes is not {wanted}: its body is not msgpack") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"blob of {len(blob)} bytes is not {wanted}: its body is not a map")
    return fields


def field_of(fields: dict[str, Any], name: str, kind: type[_T]) -> _T:
    """Return one field of a blob, if it is exactly of type `kind`.

    Raises:
        ConfigError: It is missing or of another type.
    """
    value = fields.get(name)
    if type(value) is not kind:
        raise ConfigError(f"field {name} of the peer's blob is {type(value).__name__}; expected {kind.__name__}")
    return value


def wanted_lane(transport: str, offer: dict[str, Any], here: str) -> str:
    """Return the lane that the two ends of a session ask for: "auto", "shm" or "net".

    Args:
        offer: Fields of the writer's blob.
        here: Lane of the target's settings.

    Raises:
        ConfigError: They ask for different ones.
    """
    there = field_of(offer, "lane", str)
    if "auto" not in (here, there) and here != there:
        raise ConfigError(
            f"lane of transport {transport} is {there[:32]} at the writer and {here} at the target; "
            "set both alike, or one to auto"
        )
    return there if here == "auto" else here
