"""Which addresses are of this machine for certain."""

from __future__ import annotations

import pytest

from transfer.plain_text import ANYWHERE, ON_LOOPBACK, is_loopback, why_not_plain_text

LOOPBACK = "127.0.0.1 127.8.9.10 ::1 [::1] [::1]:50051 127.0.0.1:50051 localhost LOCALHOST:1 localhost.:1"
MAPPED = "::ffff:127.0.0.1 [::ffff:127.0.0.1]:1"


@pytest.mark.parametrize("address", f"{LOOPBACK} {MAPPED}".split())
def test_loopback(address: str) -> None:
    assert is_loopback(address) and why_not_plain_text("x", address, ON_LOOPBACK) is None


ELSEWHERE = "0.0.0.0 :: * 10.0.0.1 10.0.0.1:1 [2001:db8::1]:1 2001:db8::1 ::ffff:10.0.0.1 node.example"
LOOKALIKES = "localhost.example 127.0.0.1.example 127.0.0.1.example:1 notlocalhost 127.1 2130706433 unix:/tmp/x"


@pytest.mark.parametrize("address", ["", *f"{ELSEWHERE} {LOOKALIKES}".split()])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)
    assert why_not_plain_text("server.host", address, ON_LOOPBACK) == (
        f"server.host is {address}, which is not a loopback address; without TLS it needs --insecure-anywhere (tls.insecure: 2)"
    )
    assert why_not_plain_text("server.host", address, ANYWHERE) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1"])
def test_nothing_is_plain_text_where_nobody_asked_for_it(address: str) -> None:
    assert why_not_plain_text("server.host", address, 0) is not None
