def source_hash() -> str:
    """Return the SHA-256 of the source file, in hexadecimal digits."""

class Watch:
    """A thread without Python that looks at the signals of sessions, and `poll`. Addresses and handles are used unchecked.

    One thread calls the methods. Inside `with`, no scatter is queued and no report is made.

    Args:
        functions: Addresses of cuCtxPushCurrent, cuCtxPopCurrent, cuStreamWaitValue64, cuLaunchKernel, cuMemcpyDtoHAsync
            and cuStreamWriteValue64.
        limit_s: Maximum time that a stream waits for the end of a gather.

    Raises:
        OSError: No file descriptor or thread is available.
    """

    def __new__(cls, functions: tuple[int, ...], limit_s: float, /) -> Watch: ...
    def fileno(self) -> int:
        """Return an eventfd. It is readable when `take_queued` or `take_ended` has reports, or will have some soon."""

    def has_reports(self) -> bool:
        """Return whether the eventfd is readable."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def add(self, session: int, words: int, device_words: int, context: int, /) -> None:
        """Add a session. Its words must stay mapped until `remove`, and until its scatters have ended."""

    def remove(self, session: int, /) -> None:
        """Forget a session. Its armed scatters are not queued any more."""

    def expect(self, session: int, change: int, /) -> None:
        """Change the number of expected gathers. The thread looks at a session while its number is above 0."""

    def stop(self, session: int, /) -> bool:
        """Make the writer send no more signals, and ignore those that still arrive. Return False if they were stopped before."""

    def resume(self, session: int, /) -> None:
        """Accept signals again, unless the writer has skipped an entry."""

    def arm(
        self,
        session: int,
        grant: int,
        stream: int,
        sum: int,
        cell: int,
        kernels: tuple[tuple[int, int, int, int, int, bytes], ...],
        num_first: int,
        /,
    ) -> bool:
        """Prepare a scatter, which the thread queues when the gather into the grant begins. Return False without the session.

        Args:
            grant: Position at which the grant begins.
            stream: Handle of the stream.
            sum: Address on the device of the digest, which is 0 before the kernels run.
            cell: Address of two words in pinned memory, which the stream writes: the sum, and a number at the end.
            kernels: Function, two dimensions of the grid, threads, bytes of shared memory, and parameters of each kernel.
            num_first: Number of kernels that only need the first half of the gather.
        """

    def disarm(self, grant: int, /) -> None:
        """Forget an armed scatter. One that was queued is not affected."""

    def poll(self, fd: int, timeout_s: float | None, /) -> bool:
        """Look at the words until a file descriptor is readable, no gather or scatter is near its end, or the time is over.

        Return False at once if none is near. An eventfd of the watch makes an epoll descriptor with it readable.
        """

    def take_queued(self) -> list[int]:
        """Return the grants whose scatters were queued since the last call."""

    def take_ended(self) -> tuple[list[tuple[int, bool | None, float]], list[tuple[int, int, int]]]:
        """Return the ends since the last call. Their writers can reuse the entries.

        First, the scatters that `take_queued` has returned: grant, whether the digests are equal (None if the gather was given
        up), and seconds. Second, the gathers that have ended without a scatter: session, grant, and digest.

        Raises:
            RuntimeError: A scatter could not be queued.
        """

    def close(self) -> None:
        """End the thread, and the waits of scatters for their gathers. Their results are lost."""
