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

def wait_for_words(words: Buffer, last: Buffer, timeout_ns: int, least_pause_ns: int, most_pause_ns: int, /) -> bool:
    """Wait, without the GIL, until a word in memory is at least its value. Return False after the timeout.

    The pauses between two looks are a sixteenth of the time waited so far, within the limits. Nothing is checked.

    Args:
        words: uint64 [n, 2]: the address of a word, and its value.
        last: uint64 [n, 2]: words to write, in this order, after the timeout. Still without the GIL.
    """
