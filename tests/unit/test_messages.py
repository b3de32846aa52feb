"""Control messages: round trip, wire stability, and no input gets past `decode` other than as a message or an error."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import RemoteProtocolError
from transfer.messages import (
    MAX_CHUNKS_PER_MESSAGE,
    MAX_MESSAGE_BYTES,
    MESSAGE_TYPES,
    PROTOCOL_VERSIONS,
    AbortTransfer,
    ChunkReady,
    ChunkRejected,
    ChunkSize,
    GrantRefused,
    GrantRequest,
    GrantsIssued,
    IssuedGrant,
    Message,
    WriterDrained,
    clip_reason,
    decode,
    encode,
)

UINT64_MAX = 2**64 - 1

GOLDEN: dict[type[Message], tuple[Message, str]] = {
    GrantRequest: (
        GrantRequest(
            incarnation=2**63 + 1,
            request_id="r-1",
            route=2,
            chunks=(ChunkSize(chunk=0, num_bytes=4096), ChunkSize(chunk=300, num_bytes=1)),
        ),
        "960101cf8000000000000001a3722d3102929200cd100092cd012c01",
    ),
    ChunkReady: (
        ChunkReady(incarnation=7, request_id="r-1", route=0, chunk=5, begin=65536, num_bytes=4096, digest=UINT64_MAX, attempt=1),
        "9a010207a3722d310005ce00010000cd1000cfffffffffffffffff01",
    ),
    WriterDrained: (WriterDrained(incarnation=7, request_id="é", route=1), "95010307a2c3a901"),
    GrantsIssued: (
        GrantsIssued(incarnation=7, request_id="r-1", route=2, grants=(IssuedGrant(chunk=0, begin=256, end=4352),)),
        "96010407a3722d3102919300cd0100cd1100",
    ),
    GrantRefused: (GrantRefused(incarnation=7, request_id="r-1", route=2, reason="no"), "96010507a3722d3102a26e6f"),
    ChunkRejected: (
        ChunkRejected(incarnation=7, request_id="r-1", route=2, chunk=3, begin=512, attempt=0, reason="digest"),
        "99010607a3722d310203cd020000a6646967657374",
    ),
    AbortTransfer: (AbortTransfer(incarnation=7, request_id="r-1", route=2, reason=""), "96010707a3722d3102a0"),
}

uint64s = st.one_of(st.integers(0, 300), st.integers(0, UINT64_MAX), st.just(UINT64_MAX))
positives = st.one_of(st.integers(1, 300), st.integers(1, UINT64_MAX))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=128)
request_ids = texts.filter(bool)
header = {"incarnation": positives, "request_id": request_ids}
chunk_lists = st.lists(
    st.builds(ChunkSize, chunk=uint64s, num_bytes=positives), min_size=1, max_size=6, unique_by=lambda c: c.chunk
)
ranges = st.tuples(uint64s, uint64s).filter(lambda pair: pair[0] != pair[1]).map(sorted)
grants = st.builds(lambda chunk, span: IssuedGrant(chunk=chunk, begin=span[0], end=span[1]), uint64s, ranges)
grant_lists = st.lists(grants, min_size=1, max_size=6, unique_by=lambda g: g.chunk)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(GrantRequest, **header, route=uint64s, chunks=chunk_lists.map(tuple)),
    st.builds(
        ChunkReady, **header, route=uint64s, chunk=uint64s, begin=uint64s, num_bytes=positives, digest=uint64s, attempt=uint64s
    ),
    st.builds(WriterDrained, **header, route=uint64s),
    st.builds(GrantsIssued, **header, route=uint64s, grants=grant_lists.map(tuple)),
    st.builds(GrantRefused, **header, route=uint64s, reason=texts),
    st.builds(ChunkRejected, **header, route=uint64s, chunk=uint64s, begin=uint64s, attempt=uint64s, reason=texts),
    st.builds(AbortTransfer, **header, route=uint64s, reason=texts),
)

hostile_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), UINT64_MAX),
    st.sampled_from([-1, 0, 2**63, UINT64_MAX, 1.0, float("nan"), "", "7", "x" * 129, "x" * 513, b"", b"7", b"\xff"]),
    st.sampled_from([[], [[]], [1], {}, {"a": 1}]),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=8)),
    st.just(msgpack.Timestamp(1)),
    st.lists(st.lists(st.integers(-1, 5), max_size=4), max_size=3),
)


def test_the_wire_format_does_not_change() -> None:
    assert set(GOLDEN) == set(MESSAGE_TYPES)
    assert [message_type.tag for message_type in MESSAGE_TYPES] == list(range(1, len(MESSAGE_TYPES) + 1))
    assert PROTOCOL_VERSIONS == (1,), "`encode()` does not use the session's version; with a second one it must"
    for message, golden in GOLDEN.values():
        assert encode(message).hex() == golden
        assert decode(bytes.fromhex(golden)) == message
        assert msgpack.unpackb(encode(message))[0] == 1


@given(message=messages)
def test_round_trip(message: Message) -> None:
    decoded = decode(encode(message))
    assert decoded == message
    assert type(decoded) is type(message)


def _paths(value: Any, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = [at] if at else []
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += _paths(item, (*at, index))
    return found


def _replaced(value: Any, path: tuple[int, ...], edit: Any) -> Any:
    if len(path) == 1:
        return edit(value, path[0])
    return [*value[: path[0]], _replaced(value[path[0]], path[1:], edit), *value[path[0] + 1 :]]


@given(data=st.data())
def test_a_mutated_message_decodes_to_its_own_type_or_is_refused(data: st.DataObject) -> None:
    message = data.draw(messages)
    parts = msgpack.unpackb(encode(message))
    path = data.draw(st.sampled_from(_paths(parts)))
    value = data.draw(hostile_values)
    edit = data.draw(
        st.sampled_from(
            [
                lambda items, at: [*items[:at], value, *items[at + 1 :]],
                lambda items, at: [*items[:at], *items[at + 1 :]],
                lambda items, at: [*items[:at], value, *items[at:]],
                lambda items, at: [*items, items[at]],
            ]
        )
    )
    mutated = msgpack.packb(_replaced(parts, path, edit))
    try:
        decoded = decode(mutated)
    except RemoteProtocolError as error:
        assert len(str(error)) < 700 and "\n" not in str(error)
        return
    assert path == (1,) or type(decoded) is type(message)
    # Whatever was accepted says exactly what was on the wire: nothing was coerced, defaulted or dropped.
    assert msgpack.unpackb(encode(decoded)) == msgpack.unpackb(mutated)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([2, 3, 7, "r", 1], "version is 2; spoken here: 1"),
        ([1, 99, 7, "r", 1], "tag is 99; it must be one of 1, 2, 3, 4, 5, 6, 7"),
        ([1, 3, 0, "r", 1], "WriterDrained.incarnation is 0"),
        ([1, 3, 7, "r", -1], "WriterDrained.route is -1"),
        ([1, 3, 7, "r"], "WriterDrained has 2 fields; it must have 3: incarnation, request_id, route"),
        ([1, 1, 7, "r", 1, 5], "GrantRequest.chunks is of type int; it must be an array of arrays"),
        ([1, 1, 7, "r", 1, [[1]]], "GrantRequest.chunks.0 is an array of 1; it must be an array of chunk, num_bytes"),
        ([1, 1, 7, "r", 1, [[1, 5], [1, 6]]], "names a chunk twice"),
        ([1, 4, 7, "r", 1, [[1, 5, 5]]], "begin must be below end"),
        ([1, 4, 7, "r", 1, [[1, 5, 6], [1, 6, 7]]], "names a chunk twice"),
        ([1, 7], "message is an array of 2"),
    ],
)
def test_an_error_names_the_field_and_the_value(parts: Any, named: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode(msgpack.packb(parts))
    assert named in str(caught.value)


def test_limits_hold() -> None:
    with pytest.raises(RemoteProtocolError, match=f"at most {MAX_MESSAGE_BYTES}"):
        decode(b"\x00" * (MAX_MESSAGE_BYTES + 1))
    too_many = [[chunk, 1] for chunk in range(MAX_CHUNKS_PER_MESSAGE + 1)]
    with pytest.raises(RemoteProtocolError, match="1025 exceeds"):
        decode(msgpack.packb([1, 1, 7, "r", 1, too_many]))
    with pytest.raises(RemoteProtocolError):
        decode(b"\xdd\xff\xff\xff\xff")  # an array that claims four billion entries
    with pytest.raises(RemoteProtocolError):
        decode(b"\x91" * 100_000 + b"\x00")  # nested beyond any stack
    with pytest.raises(RemoteProtocolError):
        decode(encode(GOLDEN[WriterDrained][0]) + b"\x00")


def peak_of(payload: bytes) -> int:
    """Most that Python takes while it refuses the payload."""
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError):
            decode(payload)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "claim", [b"\xdc\x04\x00", b"\xdd\x00\x00\x04\x00", b"\xdd\xff\xff\xff\xff", b"\xdc\x00\x20", b"\xdf\x00\x00\xff\xff"]
)
def test_claims_in_claims_take_no_memory(claim: bytes) -> None:
    """With room made for what each of them claims it would be 8 MB."""
    for head in (b"", b"\x96\x01\x01\x07\xa1r\x01", b"\x96\x01\x01\x07\xa1r\x01\xdc\x04\x00\x92\x01"):
        assert peak_of(head + claim * 1000) < 1 << 20


@pytest.mark.parametrize("number", [32, 33, MAX_CHUNKS_PER_MESSAGE])
def test_long_lists_are_read_as_short_ones(number: int) -> None:
    message = GrantRequest(
        incarnation=7, request_id="r", route=0, chunks=tuple(ChunkSize(chunk=chunk, num_bytes=1) for chunk in range(number))
    )
    payload = encode(message)
    assert decode(payload) == message
    for wrong, named in (
        (payload[:-1], "is not msgpack within its limits"),
        (payload + b"\x00", "extra data"),
        (payload.replace(b"\x96\x01\x01", b"\x96\x01\x05", 1), "GrantRefused.reason is an array"),
        (payload.replace(b"\x96\x01\x01", b"\xdc\x00\x29\x01\x01", 1), "is not msgpack within its limits"),
    ):
        with pytest.raises(RemoteProtocolError, match=named):
            decode(wrong)


def test_the_largest_message_fits_its_limit() -> None:
    largest = tuple(
        IssuedGrant(chunk=UINT64_MAX - i, begin=UINT64_MAX - 1, end=UINT64_MAX) for i in range(MAX_CHUNKS_PER_MESSAGE)
    )
    message = GrantsIssued(incarnation=UINT64_MAX, request_id="\U0001f600" * 128, route=UINT64_MAX, grants=largest)
    assert decode(encode(message)) == message
    refused = GrantRefused(incarnation=UINT64_MAX, request_id="\U0001f600" * 128, route=UINT64_MAX, reason="\U0001f600" * 512)
    assert decode(encode(refused)) == refused


@given(text=st.text(max_size=2000))
def test_any_text_can_be_clipped_to_a_reason(text: str) -> None:
    reason = clip_reason(text)
    message = AbortTransfer(incarnation=1, request_id="r", route=0, reason=reason)
    assert decode(encode(message)) == message
    assert "\n" not in reason


def test_clip_reason_keeps_short_text_and_cuts_long() -> None:
    assert clip_reason("pool full:\n 3 of 3 pages") == "pool full: 3 of 3 pages"
    assert clip_reason("a" * 513) == "a" * 511 + "…"
    assert clip_reason("a" * 512) == "a" * 512
    assert clip_reason("bad \ud800 id") == "bad ? id"
