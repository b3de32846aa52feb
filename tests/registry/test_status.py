"""Errors to statuses and back."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

import transfer.errors
from transfer.breaker import Verdict
from transfer.connector.attempt import is_retried, verdict_of
from transfer.errors import (
    ChunkTooLarge,
    ConfigError,
    EngineError,
    IntegrityError,
    LayoutError,
    LocalProtocolError,
    MemoryPlanError,
    NodeDraining,
    OutOfMemory,
    PeerUnreachable,
    Preempted,
    ProtocolError,
    RemoteProtocolError,
    ResourceExhausted,
    StoreFailed,
    TransferAborted,
    TransferError,
    TransportClosed,
    TransportError,
    TransportTimeout,
    WriteFailed,
)
from transfer.registry.status import MAX_DETAILS_CHARS, SPARES_KV, details_of, error_of, reason_of, status_details, status_of


def all_error_types() -> list[type[TransferError]]:
    return [value for value in vars(transfer.errors).values() if isinstance(value, type) and issubclass(value, TransferError)]


def call_error(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


STATUS_OF_ERROR = {
    "INVALID_ARGUMENT": (ConfigError, RemoteProtocolError),
    "FAILED_PRECONDITION": (LayoutError, ChunkTooLarge),
    "RESOURCE_EXHAUSTED": (ResourceExhausted, MemoryPlanError, OutOfMemory),
    "UNAVAILABLE": (
        TransportError, PeerUnreachable, NodeDraining, WriteFailed, TransportTimeout, TransportClosed, StoreFailed,
    ),
    "DATA_LOSS": (IntegrityError,),
    "ABORTED": (TransferAborted,),
    "INTERNAL": (EngineError, TransferError, ProtocolError, LocalProtocolError, Preempted),
}  # fmt: skip

ERROR_OF_STATUS = {
    ConfigError: ("INVALID_ARGUMENT", "OUT_OF_RANGE", "PERMISSION_DENIED", "UNAUTHENTICATED"),
    LayoutError: ("FAILED_PRECONDITION",),
    ResourceExhausted: ("RESOURCE_EXHAUSTED",),
    TransportTimeout: ("DEADLINE_EXCEEDED",),
    PeerUnreachable: ("UNAVAILABLE", "ALREADY_EXISTS"),
    TransportClosed: ("NOT_FOUND",),
    TransferAborted: ("CANCELLED", "ABORTED"),
    IntegrityError: ("DATA_LOSS",),
    RemoteProtocolError: ("UNIMPLEMENTED",),
    EngineError: ("INTERNAL",),
    TransportError: ("UNKNOWN",),
}


def test_every_error_has_its_status() -> None:
    """Check this for nodes of other releases, which depend on the status."""
    assert {kind for kinds in STATUS_OF_ERROR.values() for kind in kinds} == set(all_error_types())
    for name, kinds in STATUS_OF_ERROR.items():
        assert {status_of(kind("x")).name for kind in kinds} == {name}
    assert status_of(KeyError("x")) is grpc.StatusCode.INTERNAL


def test_every_status_has_its_error() -> None:
    for kind, names in ERROR_OF_STATUS.items():
        for name in names:
            error = error_of(call_error(grpc.StatusCode[name], "why"), peer="10.0.0.1:7000")
            assert type(error) is kind
            assert str(error) == "10.0.0.1:7000: why"
    assert {name for names in ERROR_OF_STATUS.values() for name in names} == set(grpc.StatusCode.__members__) - {"OK"}


def packed(error: TransferError) -> status_pb2.Status | None:
    details = status_details(status_of(error), details_of(error), reason_of(error))
    return None if details is None else status_pb2.Status.FromString(details)


def test_every_error_has_a_reason_and_a_retry_time() -> None:
    for kind in all_error_types():
        status = packed(kind("it is so"))
        assert status is not None
        assert (status.code, status.message) == (status_of(kind("")).value[0], "it is so")
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        reason = reason_of(kind(""))
        assert (info.domain, info.reason) == ("kvferry", reason.word)
        retry = error_details_pb2.RetryInfo()
        if reason.retry_s is None:
            assert len(status.details) == 1
        else:
            assert status.details[1].Unpack(retry) and retry.retry_delay.ToTimedelta().total_seconds() == reason.retry_s
    assert reason_of(NodeDraining("")).word == "NODE_DRAINING" and reason_of(PeerUnreachable("")).word == "PEER_UNREACHABLE"
    assert reason_of(KeyError("")).word == "INTERNAL"


def test_a_call_whose_connection_breaks_is_not_the_fault_of_the_peers_engine() -> None:
    broken = call_error(grpc.StatusCode.INTERNAL, "Internal error from Core")
    assert status_of(error_of(broken, peer="p")) is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("error_type", all_error_types())
def test_an_error_keeps_its_status_across_a_relay(error_type: type[TransferError]) -> None:
    """Decode node, prefill node, client: passing an error on may not turn it into another status."""
    code = status_of(error_type("x"))
    relayed = error_of(call_error(code, "x"), peer="p")
    assert status_of(relayed) is code


def test_an_engine_error_of_a_peer_that_cannot_say_blames_the_kv() -> None:
    for trailing, spares_kv in ((), False), ((("kvferry-spares-kv", "0"),), False), ((SPARES_KV,), True):
        call = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details="x")
        heard = error_of(call, peer="p")
        assert isinstance(heard, EngineError) and heard.spares_kv == spares_kv


def test_out_of_memory_in_a_step_differs_from_a_lack_of_room() -> None:
    """The one speaks against a node, the other does not."""
    for trailing, kind in ((), ResourceExhausted), ((SPARES_KV,), OutOfMemory):
        code, metadata = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(*trailing)
        heard = error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details="x"), peer="p")
        assert type(heard) is kind
    assert verdict_of(OutOfMemory("x")) is Verdict.FAILURE and not is_retried(OutOfMemory("x"))


def test_details_are_one_line_and_fit_a_header() -> None:
    assert details_of(TransferError("a\nb\t c")) == "a b c"
    assert len(details_of(TransferError("x" * 10_000))) == MAX_DETAILS_CHARS
    assert details_of(KeyError("secret")) == "unexpected KeyError; see the log of the node"
