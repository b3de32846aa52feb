"""A liveness pipe whose ends are both here, and what is refused as an address; processes in tests/cluster/links."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import ConfigError, PeerUnreachable
from transfer.transport.liveness import LivenessPipe, PeerPipe, PipeAddress


def test_both_ends_in_one_process(tmp_path: Path) -> None:
    own = LivenessPipe()
    line = PeerPipe(PipeAddress.from_wire(own.address.to_wire()))
    assert not line.has_left and not line.is_over
    with open(tmp_path / "file", "w") as file, pytest.raises(PeerUnreachable, match="is not its liveness pipe"):
        PeerPipe(replace(own.address, fd=file.fileno(), inode=os.fstat(file.fileno()).st_ino))
    with pytest.raises(PeerUnreachable, match="is not its liveness pipe"):
        PeerPipe(replace(own.address, inode=own.address.inode + 1))
    own.end()
    own.end()
    assert line.is_over
    line.close()


def test_a_signature_is_of_one_message_and_ends_nothing() -> None:
    for message, is_signed in ((b"answer", True), (b"another answer", False)):
        own = LivenessPipe()
        line = PeerPipe(own.address)
        own.sign(b"answer")
        if is_signed:
            line.check_signed(message)
        else:
            with pytest.raises(PeerUnreachable, match="did not write the answer"):
                line.check_signed(message)
        assert not line.has_left and not line.is_over
        own.end()
        assert line.is_over
        line.close()


@given(
    place=st.integers(0, 5),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(-(2**64), -1), st.integers(2**64, 2**66), st.text(max_size=4), st.binary()
    ),
)
def test_addresses_are_checked(place: int, value: object) -> None:
    own = LivenessPipe()
    wire = own.address.to_wire()
    own.end()
    if place < 3:
        wire[1 + place] = value
    elif place == 3:
        wire[0][3] = value
    elif place == 4:
        wire = wire[:-1]
    else:
        wire[0] = value
    with pytest.raises(ConfigError):
        PipeAddress.from_wire(wire)
