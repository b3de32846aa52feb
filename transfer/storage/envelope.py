"""Write and check the envelope of a stored page: a header before its bytes that identifies them.

::

    0    8 bytes   magic
    8    4         version of this header
    12   4         length of this header: 512
    16   8         length of the page
    24   16        XXH3-128 of the page
    40   256       the key, filled up with zeros
    504  8         XXH3-64 of all bytes of the header before

Integers are little-endian. The digests find accidental damage by disks and partial copies, not malicious changes: every writer of
the store is trusted, see SECURITY.md.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from transfer.storage.base import Outcome
from transfer.storage.keys import fingerprint_of

MAGIC: Final = b"KVFERRY\0"
VERSION: Final = 1
HEADER_BYTES: Final = 512

_FIELDS: Final = struct.Struct("<8sIIQ16s256s")
_DIGEST: Final = struct.Struct("<Q")


def header_of(key: str, page: memoryview) -> bytes:
    """Return the header of a page under that key. Raise ConfigError if it is no key."""
    fingerprint_of(key)
    fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, page.nbytes, xxhash.xxh3_128_digest(page), key.encode())
    head = fields.ljust(HEADER_BYTES - _DIGEST.size, b"\0")
    return head + _DIGEST.pack(xxhash.xxh3_64_intdigest(head))


def check(key: str, header: bytes | bytearray, page: memoryview, *, num_bytes: int) -> Outcome:
    """Check whether the bytes that were read are the page of that key.

    Args:
        header: The first `HEADER_BYTES` bytes, or fewer if there were fewer.
        page: The following bytes, in a view of the page's exact size. Undefined after the last byte that was read.
        num_bytes: Stored bytes, header and page together.

    Returns:
        `OK`, `CORRUPT` or `FOREIGN`.
    """
    head = bytes(header[:HEADER_BYTES])
    if num_bytes == HEADER_BYTES + page.nbytes and head == header_of(key, page):
        return Outcome.OK
    return Outcome.FOREIGN if _is_of_something_else(key, head) else Outcome.CORRUPT


def _is_of_something_else(key: str, head: bytes) -> bool:
    """Return whether a header is intact, but not of a page under that key in this format."""
    if len(head) < HEADER_BYTES:
        return False
    magic, version, header_bytes, _, _, stored_key = _FIELDS.unpack_from(head)
    if magic == MAGIC and version != VERSION:
        return True
    if _DIGEST.pack(xxhash.xxh3_64_intdigest(head[: -_DIGEST.size])) != head[-_DIGEST.size :]:
        return False
    is_empty_behind = not any(head[_FIELDS.size : -_DIGEST.size])
    return (magic, header_bytes, stored_key.rstrip(b"\0"), is_empty_behind) != (MAGIC, HEADER_BYTES, key.encode(), True)
