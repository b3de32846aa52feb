"""Carry the prompts of a decode leader to a prefill leader in one stream, `PrefillControl.StreamPrompts`.

A message on an open stream arrives sooner than a new call. Each prompt has a number, and is served like a call of
`PrefillIntoRoom`: its messages, events and status are the same. `PromptStream` is the end of the decode leader, and
`serve_prompts` is that of the prefill leader. No end waits for one prompt before it reads messages of another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import grpc
import structlog

from transfer.errors import RemoteProtocolError
from transfer.loop_turns import TimedSteps
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.status import SPARES_KV, details_of, readable
from transfer.tracing import TRACEPARENT

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import PrefillControlAsyncStub

MAX_PROMPTS: Final = 1024
"""Prompts of a stream at a time. Further prompts have calls of their own."""

MAX_EVENTS: Final = 8
"""Events of a prompt that its reader has not taken yet. A prompt has at most six, with its status."""

MAX_MESSAGES: Final = 3
"""Messages of a prompt that its method has not taken yet. The third one fails the prompt, so no further one is kept."""

MAX_UNSENT_EVENTS: Final = 64
"""Events of all prompts that gRPC has not taken yet. Above it, prompts wait, as calls do if their caller does not read."""

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}

log = structlog.get_logger(__name__)


def _status(code: grpc.StatusCode, details: str, *, spares_kv: bool = False) -> pb.PromptStatus:
    return pb.PromptStatus(code=code.value[0], details=details, spares_kv=spares_kv)


class PromptStream:
    """The decode leader's end of a stream. Owned by the leader's loop.

    Args:
        stub: Opens the stream.
        channel: Channel of the stub.
    """

    def __init__(self, stub: PrefillControlAsyncStub, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._calls: dict[int, PromptCall] = {}  # by number
        self._last = 0  # number of the prompt that began last
        self._unsent: asyncio.Queue[pb.PromptMessage | None] = asyncio.Queue()
        self._is_open = True
        self._is_retired = False
        self._stream = stub.StreamPrompts(self._messages())
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def is_full(self) -> bool:
        """Whether it takes no further prompt now. Messages count that a peer does not read."""
        return len(self._calls) + self._unsent.qsize() >= MAX_PROMPTS

    def begin(self, request: pb.PrefillRequest, room: asyncio.Future[pb.PrefillRoom], *, traceparent: str) -> PromptCall:
        """Send a prompt, and its room once that is set."""
        self._last += 1
        number = self._last
        self._unsent.put_nowait(
            pb.PromptMessage(prompt=number, message=pb.PrefillMessage(request=request), traceparent=traceparent)
        )
        room.add_done_callback(lambda room: self._send_room(number, room))
        call = self._calls[number] = PromptCall(lambda: self._cancel(number))
        return call

    def retire(self) -> None:
        """End the stream once it has no prompt."""
        self._is_retired = True
        if not self._calls:
            self._stream.cancel()

    def _send_room(self, number: int, room: asyncio.Future[pb.PrefillRoom]) -> None:
        if number in self._calls and not room.cancelled():
            self._unsent.put_nowait(pb.PromptMessage(prompt=number, message=pb.PrefillMessage(room=room.result())))

    def _cancel(self, number: int) -> None:
        """Give a prompt up. No-op once it has ended."""
        if number in self._calls:
            self._unsent.put_nowait(pb.PromptMessage(prompt=number, cancelled=pb.PromptCancelled()))
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._calls[number]
        if self._is_retired:
            self.retire()

    async def _messages(self) -> AsyncIterator[pb.PromptMessage]:
        while (message := await self._unsent.get()) is not None:
            yield message

    async def _read(self) -> None:
        """Give each event to its prompt. The end of the stream ends all of its prompts, as if their calls had ended."""
        status = _status(grpc.StatusCode.UNAVAILABLE, "the stream of prompts has ended")
        try:
            async for event in self._stream:
                self._on_event(readable(event, method="StreamPrompts"))
        except grpc.aio.AioRpcError as error:
            status = _status(error.code(), error.details() or error.code().name)
        except RemoteProtocolError as error:
            status = _status(grpc.StatusCode.UNKNOWN, str(error))
        finally:
            self._is_open = False
            self._stream.cancel()
            self._unsent.put_nowait(None)  # gRPC still waits for the next message
            calls, self._calls = self._calls, {}
            for call in calls.values():
                call.add(pb.PromptEvent(status=status))

    def _on_event(self, event: pb.PromptEvent) -> None:
        number = event.prompt
        if not 1 <= number <= self._last:
            raise RemoteProtocolError(f"StreamPrompts has an event of prompt {number}, which was not sent")
        call = self._calls.get(number)
        if call is None:
            return  # it was given up meanwhile
        if call.num_events == MAX_EVENTS:
            self._cancel(number)
            event = pb.PromptEvent(status=_status(grpc.StatusCode.UNKNOWN, "too many events of one prompt"))
        elif event.HasField("status"):
            self._forget(number)
        call.add(event)


class PromptCall:
    """A prompt of a `PromptStream`. It yields events, and ends, as a call of `PrefillIntoRoom` does.

    Args:
        cancel: Gives the prompt up.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self._events: asyncio.Queue[pb.PromptEvent] = asyncio.Queue()

    @property
    def num_events(self) -> int:
        """Number of events that are not taken yet."""
        return self._events.qsize()

    def add(self, event: pb.PromptEvent) -> None:
        self._events.put_nowait(event)

    def __aiter__(self) -> AsyncIterator[pb.PrefillEvent]:
        return self

    async def __anext__(self) -> pb.PrefillEvent:
        event = await self._events.get()
        if not event.HasField("status"):
            return event.event
        status = event.status
        if not status.code:
            raise StopAsyncIteration
        trailing = grpc.aio.Metadata(*((SPARES_KV,) if status.spares_kv else ()))
        raise grpc.aio.AioRpcError(
            _CODES.get(status.code, grpc.StatusCode.UNKNOWN), grpc.aio.Metadata(), trailing, status.details
        )


Serve = Callable[[AsyncIterator[pb.PrefillMessage], grpc.aio.ServicerContext[Any, Any]], AsyncGenerator[pb.PrefillEvent, None]]
"""A servicer's `PrefillIntoRoom`."""


async def serve_prompts(
    messages: AsyncIterator[pb.PromptMessage], serve: Serve, *, over: asyncio.Future[Any]
) -> AsyncGenerator[pb.PromptEvent, None]:
    """Serve a call of `StreamPrompts`. Its prompts are given up when it ends. The caller must close the iterator.

    Args:
        serve: Called for each prompt.
        over: Done when the stream is to end, once it has no prompt.

    Raises:
        RemoteProtocolError: A number breaks a rule.
    """
    prompts = _ServedPrompts(serve)
    reading = asyncio.ensure_future(prompts.read(messages))
    over.add_done_callback(prompts.end_when_idle)
    try:
        while (event := await prompts.next_event()) is not None:
            yield event
        if reading.done():
            reading.result()  # raises its error
    finally:
        over.remove_done_callback(prompts.end_when_idle)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await prompts.close()


class _ServedPrompts:
    """The prompts of one call of `StreamPrompts`."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._last = 0  # highest number
        self._prompts: dict[int, tuple[_Messages, asyncio.Task[None]]] = {}  # those that are not cancelled
        self._tasks: set[asyncio.Task[None]] = set()  # includes those that end after a cancellation
        self._is_ending = False
        self._events: asyncio.Queue[pb.PromptEvent | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(MAX_UNSENT_EVENTS)  # of events

    async def read(self, messages: AsyncIterator[pb.PromptMessage]) -> None:
        """Read messages to the end, which ends the stream."""
        try:
            async for message in messages:
                await self._on_message(message)
        finally:
            self._events.put_nowait(None)

    async def next_event(self) -> pb.PromptEvent | None:
        """Return the next event to send; None at the end of the stream."""
        event = await self._events.get()
        self._places.release()
        return event

    def end_when_idle(self, _: object) -> None:
        """End the stream once it has no prompt."""
        self._is_ending = True
        self._end_if_idle()

    async def close(self) -> None:
        """Give all prompts up. A second cancellation would interrupt a prompt that gives its transfer up."""
        for task in self._tasks:
            if not task.cancelling():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end_if_idle(self) -> None:
        if self._is_ending and not self._tasks:
            self._events.put_nowait(None)

    async def _send(self, number: int, **content: Any) -> None:
        await self._places.acquire()
        self._events.put_nowait(pb.PromptEvent(prompt=number, **content))

    async def _on_message(self, message: pb.PromptMessage) -> None:
        number, is_cancelled = message.prompt, message.HasField("cancelled")
        if number == 0:
            raise RemoteProtocolError("StreamPrompts has a message of prompt 0; numbers begin at 1")
        if number > self._last and not is_cancelled:
            self._last = number
            await self._begin(number, message)
        elif number > self._last:
            raise RemoteProtocolError(f"StreamPrompts cancels prompt {number}, which has not begun")
        elif number in self._prompts:
            given, task = self._prompts[number]
            if is_cancelled:
                del self._prompts[number]
                task.cancel()
            elif not given.full():
                given.put_nowait(message.message)
        elif message.message.HasField("request"):
            raise RemoteProtocolError(f"StreamPrompts begins prompt {number}, but numbers must increase, and had {self._last}")
        # Otherwise the message has crossed the end of its prompt.

    async def _begin(self, number: int, message: pb.PromptMessage) -> None:
        if len(self._tasks) >= MAX_PROMPTS:
            details = f"a stream can have {MAX_PROMPTS} prompts at a time"
            await self._send(number, status=_status(grpc.StatusCode.RESOURCE_EXHAUSTED, details))
            return
        given = _Messages(MAX_MESSAGES)
        given.put_nowait(message.message)
        task = asyncio.get_running_loop().create_task(self._run(number, given, message.traceparent))
        self._prompts[number] = given, task
        self._tasks.add(task)
        task.add_done_callback(self._on_over)

    def _on_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._end_if_idle()

    async def _run(self, number: int, given: _Messages, traceparent: str) -> None:
        status = await TimedSteps("PrefillIntoRoom", self._follow(number, given, _PromptContext(traceparent)))
        self._prompts.pop(number, None)
        await self._send(number, status=status)

    async def _follow(self, number: int, given: _Messages, context: _PromptContext) -> pb.PromptStatus:
        """Serve a prompt, and return its status."""
        try:
            serving = self._serve(given, cast("grpc.aio.ServicerContext[Any, Any]", context))
            async with contextlib.aclosing(serving) as events:
                async for event in events:
                    await self._send(number, event=event)
        except _Ended as ended:
            return ended.status
        except Exception as error:
            log.critical("prompt_crashed", error=str(error), exc_info=error)
            return _status(grpc.StatusCode.UNKNOWN, details_of(error))  # as gRPC does for a call
        return pb.PromptStatus()


class _Messages(asyncio.Queue[pb.PrefillMessage]):
    """Messages of a prompt, for its method."""

    def __aiter__(self) -> AsyncIterator[pb.PrefillMessage]:
        return self

    async def __anext__(self) -> pb.PrefillMessage:
        return await self.get()


class _Ended(Exception):
    """A prompt's method has ended it with a status."""

    def __init__(self, status: pb.PromptStatus) -> None:
        super().__init__(status.details)
        self.status = status


class _PromptContext:
    """The part of a call's context that a prompt's method uses."""

    def __init__(self, traceparent: str) -> None:
        self._metadata = ((TRACEPARENT, traceparent),) if traceparent else ()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> NoReturn:
        raise _Ended(_status(code, details, spares_kv=SPARES_KV in trailing_metadata))
