from typing_extensions import Buffer

def has_avx2() -> bool:
    """Return whether the processor has the vector instructions that the copies can use."""

def source_hash() -> str:
    """Return the SHA-256 of the source file, in hexadecimal digits."""

def copy_pages(
    buffers: Buffer,
    pages: Buffer,
    page_size: int,
    wire: int,
    num_bytes: int,
    algorithm: int,
    is_gather: bool,
    is_streaming: bool,
    has_avx2: bool,
    /,
) -> int:
    """Copy buffers between pages and the wire. Return the digest of the wire, or 0 without an algorithm.

    Nothing is checked. With an algorithm, the buffers must be the wire's bytes in order and without gaps.

    Args:
        buffers: int64 [n, 9], the fields of `compiled_copy._BUFFER_FIELDS`.
        pages: int64 [m], the page table from the buffers' token 0 on.
        wire: Address of the wire bytes.
        num_bytes: Bytes of the wire.
        algorithm: 0 for no digest, 1 for XXH3 (at least 241 bytes), 2 for words.
        is_streaming: Write past the caches.
    """
