"""Which names of a certificate an allow-list lets in."""

from __future__ import annotations

import pytest

from transfer.peer_names import SubjectNames, checked_entry, dns_name_of, first_match

URI = "spiffe://cluster.example/decode"
GOOD = f"decode-0.example localhost *.decode.example Decode.EXAMPLE a_b.example xn--caf-dma.example {URI} urn://x"
BAD = (
    "* *. a.*.example **.example *a.example -a.example a..example .example a.example. 10.0.0.1 ::1 [::1] a.example:7001 ü.example"
)
BAD += " https//x spiffe:// spiffe://*/x"


@pytest.mark.parametrize("entry", GOOD.split())
def test_valid_peer_names_are_accepted(entry: str) -> None:
    assert checked_entry(entry) == entry


@pytest.mark.parametrize(
    "entry",
    ["", " ", "a b", "spiffe://a b", *BAD.split(), "x" * 64 + ".example"],
)
def test_invalid_peer_names_are_rejected(entry: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid name; it must be a DNS name .* or a URI"):
        checked_entry(entry)


@pytest.mark.parametrize(
    ("allowed", "names", "match"),
    [
        (["decode.example"], SubjectNames(dns=("decode.example",)), "decode.example"),
        (["Decode.Example"], SubjectNames(dns=("dECODE.example",)), "dECODE.example"),
        (["*.example.org"], SubjectNames(dns=("decode-7.example.org",)), "decode-7.example.org"),
        ([URI], SubjectNames(uris=(URI,)), URI),
        ([URI, "decode.example"], SubjectNames(dns=("decode.example",), uris=(URI,)), "decode.example"),
    ],
)
def test_let_in(allowed: list[str], names: SubjectNames, match: str) -> None:
    assert first_match(allowed, names) == match


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([], SubjectNames(dns=("decode.example",), uris=(URI,))),
        (["decode.example"], SubjectNames()),
        (["decode.example"], SubjectNames(dns=("decode.example.org", "xdecode.example", "decode.example.", "example"))),
        (["*.example.org"], SubjectNames(dns=("example.org", "a.b.example.org", ".example.org", "xexample.org"))),
        (["*.example.org"], SubjectNames(dns=("*.example.org",))),  # who has a wildcard certificate says not who they are
        (["a.example.org"], SubjectNames(dns=("*.example.org",))),
        ([URI], SubjectNames(uris=(URI.upper(), URI + "/", URI + "?", "spiffe://cluster.example"))),
        ([URI], SubjectNames(dns=(URI,))),  # a DNS name is no URI, whatever it looks like
        (["decode.example"], SubjectNames(uris=("decode.example",))),
    ],
)
def test_not_let_in(allowed: list[str], names: SubjectNames) -> None:
    assert first_match(allowed, names) is None


def test_a_name_to_check_a_certificate_by() -> None:
    assert dns_name_of(("*.example", "a.example")) == "a.example"
    assert dns_name_of(("*.example",)) == "x.example"
    assert dns_name_of(()) is None
