"""The event loop that kvferry runs in an engine's process."""

from __future__ import annotations

import asyncio

import pytest

from node_runtime.loop_thread import LoopThread
from transfer.errors import LocalProtocolError


def test_a_closed_loop_of_the_engine_does_not_end_kvferry() -> None:
    """gRPC raises that in any loop of the process. Every other unexpected error is reported at the next call."""
    other = asyncio.new_event_loop()
    other.close()
    thread = LoopThread.shared()
    try:
        thread.call(other.call_soon_threadsafe, print)
        thread.start(asyncio.sleep(0)).result(10.0)
        thread.check()
        thread.call(lambda: 1 // 0)
        thread.start(asyncio.sleep(0)).result(10.0)
        with pytest.raises(LocalProtocolError, match="kvferry cannot continue in this process: ZeroDivisionError"):
            thread.check()
    finally:
        thread.release()
