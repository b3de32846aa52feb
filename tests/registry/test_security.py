"""How a tier that is no node is spoken to: with TLS, or in plain text where its addresses allow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.authority import Authority
from transfer.config import TlsConfig
from transfer.errors import ConfigError
from transfer.registry.security import MutualTls, PlainText, security_of_tier

NAMED = [("server.host", "10.0.0.1"), ("server.advertise_host", None), ("remote_address", "10.0.0.2:1")]


@pytest.mark.parametrize(
    ("insecure", "complaint"),
    [
        (0, "TLS is not set up; give tls.cert_file"),
        (1, "server.host is 10.0.0.1, which is not a loopback address; .*\nremote_address is 10.0.0.2:1"),
    ],
)
def test_plain_text_is_refused_for_each_address_that_it_may_not_go_to(insecure: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        security_of_tier(TlsConfig(insecure=insecure), other_tier="decode", named=NAMED)


def test_plain_text_where_the_addresses_allow_it() -> None:
    assert security_of_tier(TlsConfig(insecure=2), other_tier="decode", named=NAMED) == PlainText(insecure=2)
    local = [("server.host", "127.0.0.1")]
    assert security_of_tier(TlsConfig(insecure=1), other_tier="decode", named=local) == PlainText(insecure=1)


def test_with_certificates_the_other_tier_has_to_be_named(tmp_path: Path) -> None:
    files = Authority().files(tmp_path / "tls", "node.example")
    found = security_of_tier(files.tls(peer_names=("*.prefill.example",)), other_tier="prefill", named=NAMED)
    assert isinstance(found, MutualTls) and found.peer_names == ("*.prefill.example",) and found.client_names == ()
    with pytest.raises(ConfigError, match="peer_names is empty; it must have the names of the prefill nodes' certificates"):
        security_of_tier(files.tls(), other_tier="prefill", named=NAMED)
