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

def wait_for_words(words: Buffer, timeout_ns: int, least_pause_ns: int, most_pause_ns: int, /) -> bool:
    """Wait, without the GIL, until a word in memory is at least its value. Return False after the timeout.

    The pauses between two looks are a sixteenth of the time waited so far, within the limits. Nothing is checked.

    Args:
        words: uint64 [n, 2]: the address of a word, and its value.
    """

def begin_limit(address: int, value: int, last: Buffer, timeout_ns: int, /) -> int:
    """Begin a time limit for a word: if it has another value after the timeout, a thread without Python writes other words.

    It looks again after the same time, until the limit is ended.

    Args:
        last: uint64 [n, 2], at most two: address and value of each word to write, in order.

    Returns:
        A number for `end_limit`. The words must stay mapped until then.

    Raises:
        OSError: The thread cannot be started.
    """

def end_limit(number: int, /) -> bool:
    """End a time limit. Return whether the words were written. A number of a parent process, or an ended one, is ignored."""
