"""Errors to statuses and back: both documented tables are the ones that run."""

from __future__ import annotations

import re

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

import transfer.errors
import transfer.registry.status as status_module
from transfer.breaker import Verdict
from transfer.connector.retry_rules import is_retried, verdict_of
from transfer.errors import (
    EngineError,
    NodeDraining,
    OutOfMemory,
    PeerUnreachable,
    ResourceExhausted,
    TransferError,
)
from transfer.registry.status import MAX_DETAILS_CHARS, SPARES_KV, details_of, error_of, reason_of, status_details, status_of


def all_error_types() -> list[type[TransferError]]:
    return [value for value in vars(transfer.errors).values() if isinstance(value, type) and issubclass(value, TransferError)]


def call_error(code: grpc.StatusCode, details: str | None) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def documented(table: int) -> list[tuple[list[str], str]]:
    """Rows of the n-th table of the module's docstring as (names of the first column, name in the second)."""
    rows: list[tuple[list[str], str]] = []
    lines = (status_module.__doc__ or "").splitlines()
    rulers = [index for index, line in enumerate(lines) if line.startswith("====")]
    begin, end = rulers[3 * table + 1 : 3 * table + 3]
    widths = [len(part) for part in lines[begin].split()]
    for line in lines[begin + 1 : end]:
        first, second = line[: widths[0]], line[widths[0] + 2 : widths[0] + 2 + widths[1]]
        names = re.findall(r"[A-Za-z_]+", first)
        if second.strip():
            rows.append((names, second.strip().strip("`")))
        else:
            rows[-1][0].extend(names)
    return rows


def test_the_first_table_is_what_status_of_does() -> None:
    rows = documented(0)
    for error_type in all_error_types():
        names = [base.__name__ for base in error_type.__mro__]
        expected = next((code for first, code in rows if first[0] in names), "INTERNAL")
        assert status_of(error_type("x")).name == expected, error_type
    assert status_of(KeyError("x")) is grpc.StatusCode.INTERNAL
    assert rows[-1] == (["anything", "else"], "INTERNAL")


def test_the_second_table_is_what_error_of_does() -> None:
    expected = {name: error for names, error in documented(1) for name in names}
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            error = error_of(call_error(code, "why"), peer="10.0.0.1:7000")
            assert type(error).__name__ == expected[code.name]
            assert str(error) == "10.0.0.1:7000: why"


def packed(error: TransferError) -> status_pb2.Status | None:
    details = status_details(status_of(error), details_of(error), reason_of(error))
    return None if details is None else status_pb2.Status.FromString(details)


def test_every_error_says_its_reason_and_when_to_try_again() -> None:
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


@pytest.mark.parametrize("error_type", all_error_types())
def test_what_an_error_means_survives_a_relay(error_type: type[TransferError]) -> None:
    """Decode node, prefill node, client: passing an error on may not turn it into another status."""
    code = status_of(error_type("x"))
    relayed = error_of(call_error(code, "x"), peer="p")
    assert status_of(relayed) is code


def test_an_engine_error_of_a_peer_that_cannot_say_blames_the_kv() -> None:
    for trailing, spares_kv in ((), False), ((("kvferry-spares-kv", "0"),), False), ((SPARES_KV,), True):
        call = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details="x")
        heard = error_of(call, peer="p")
        assert isinstance(heard, EngineError) and heard.spares_kv == spares_kv


def test_memory_that_ran_out_in_a_step_is_told_from_a_lack_of_room() -> None:
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
