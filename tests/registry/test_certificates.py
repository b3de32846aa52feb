"""Certificate files: what is wrong with them is one line, and what is wrong with new ones leaves the old ones in use."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from structlog.testing import capture_logs

from tests.authority import Authority, Files, age
from transfer.errors import ConfigError
from transfer.registry.certificates import CertificateFiles


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def files(authority: Authority, tmp_path: Path) -> Files:
    return authority.files(tmp_path / "tls", "node.example", "spiffe://cluster.example/node")


def opened(files: Files, *, is_server: bool = True) -> CertificateFiles:
    return CertificateFiles(files.tls(), is_server=is_server)


def test_content_of_the_files(files: Files) -> None:
    found = opened(files).current()
    assert found.chain == files.cert.read_bytes() and found.key == files.key.read_bytes()
    assert found.names.dns == ("node.example",) and found.names.uris == ("spiffe://cluster.example/node",)
    assert found.not_after_s > 1e9


def encrypt(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    files.put(key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


def swap_key(files: Files) -> None:
    files.put(key=Authority().issue("node.example")[1])


ABSENT, NO_PEM = "which cannot be read: No such file or directory", "which contains no PEM certificate"
NO_KEY = "which holds no PEM private key without a passphrase"
NOT_ACCEPTED = "which is not accepted with tls.ca_file {ca}: unable to get local issuer certificate"
OPEN_KEY = "which all users of this machine can read or write (mode 644); chmod o-rw it"
WRONG: dict[str, tuple[Callable[[Files], object], str]] = {
    "no certificate": (lambda files: files.cert.unlink(), f"cert_file is {{cert}}, {ABSENT}"),
    "half a certificate": (lambda files: files.put(cert=files.cert.read_bytes()[:200]), f"cert_file is {{cert}}, {NO_PEM}"),
    "a passphrase": (encrypt, f"key_file is {{key}}, {NO_KEY}"),
    "another key": (swap_key, "key_file is {key}, which is not the key of the certificate in tls.cert_file, {cert}"),
    "another authority": (lambda files: files.put(ca=Authority().pem), f"cert_file is {{cert}}, {NOT_ACCEPTED}"),
    "everybody's key": (lambda files: files.key.chmod(0o644), f"key_file is {{key}}, {OPEN_KEY}"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_at_the_start_is_one_line(files: Files, case: str) -> None:
    damage, line = WRONG[case]
    damage(files)
    with pytest.raises(ConfigError) as refusal:
        opened(files)
    assert str(refusal.value) == "tls." + line.format(cert=files.cert, key=files.key, ca=files.ca)


@pytest.mark.parametrize("case", ["no certificate", "another key", "another authority"])
def test_a_later_error_keeps_the_last_valid_files(files: Files, case: str) -> None:
    age(files)
    one = opened(files)
    before = one.current()
    damage, line = WRONG[case]
    damage(files)
    with capture_logs() as lines:
        assert [one.current() for _ in range(5)] == [before] * 5
    problem = "tls." + line.format(cert=files.cert, key=files.key, ca=files.ca)
    assert lines == [{"event": "certificate_not_reloaded", "log_level": "error", "reason": problem}], "said once"
    assert one.problem == problem


EXPIRED = "which is not accepted with tls.ca_file {ca}: certificate has expired"
BOTH_USES = "whose extended key usage does not allow server and client authentication"


@pytest.mark.parametrize(
    ("how", "is_server", "end"),
    [
        ({"days": -0.5}, True, EXPIRED),
        ({"purposes": (ExtendedKeyUsageOID.CLIENT_AUTH,)}, True, BOTH_USES),
        ({"purposes": (ExtendedKeyUsageOID.SERVER_AUTH,)}, False, BOTH_USES.replace("server and ", "")),
    ],
)
def test_a_certificate_that_no_peer_accepts(
    authority: Authority, tmp_path: Path, how: dict[str, object], is_server: bool, end: str
) -> None:
    files = authority.files(tmp_path, "node.example", **how)
    with pytest.raises(ConfigError) as refusal:
        opened(files, is_server=is_server)
    assert str(refusal.value) == f"tls.cert_file is {files.cert}, " + end.format(ca=files.ca)


def test_a_server_needs_a_dns_name_and_a_client_does_not(authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path, "spiffe://cluster.example/node", purposes=(ExtendedKeyUsageOID.CLIENT_AUTH,))
    assert opened(files, is_server=False).current().names.uris == ("spiffe://cluster.example/node",)
    files = authority.files(tmp_path, "spiffe://cluster.example/node")
    with pytest.raises(ConfigError, match=r"tls.crt, which has no DNS name \(subject alternative name\)"):
        opened(files)


def test_new_files_are_taken_at_the_next_use(authority: Authority, files: Files) -> None:
    age(files)
    one = opened(files)
    before = one.current()
    assert one.current() is before, "nothing is read again that has not changed"
    cert, key = authority.issue("renewed.example")
    files.put(key=key)  # half a rotation: a key without its certificate
    assert one.current() is before and "is not the key of the certificate" in one.problem
    files.put(cert=cert)
    with capture_logs() as lines:
        after = one.current()
    assert (after.chain, after.key, one.problem) == (cert, key, "")
    assert [line["event"] for line in lines] == ["certificate_reloaded"] and lines[0]["names"] == "renewed.example"


def test_a_file_that_is_rewritten_within_one_tick_of_the_clock_is_seen(authority: Authority, files: Files) -> None:
    """Some file systems tell times in seconds: the first change must not hide the second."""
    files.put(cert=files.cert.read_bytes() + bytes(64).replace(b"\0", b"\n"))  # room for a signature that is longer
    age(files, -3600)  # never old enough to be believed, however long this machine takes
    one = opened(files)
    for _ in range(2):
        times = files.cert.stat()
        cert, key = authority.issue("node.example", "spiffe://cluster.example/node")
        for path, content in ((files.cert, cert), (files.key, key)):
            with open(path, "r+b") as file:
                file.write(content.ljust(path.stat().st_size, b"\n"))
                file.truncate(path.stat().st_size)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert one.current().chain.strip() == cert.strip()


def test_links_that_move_are_followed(authority: Authority, tmp_path: Path) -> None:
    """As Kubernetes replaces a mounted secret: the folder that a link leads to changes at once."""
    for number in (1, 2):
        age(authority.files(tmp_path / f"data{number}", f"node-{number}.example"))
    (tmp_path / "data").symlink_to("data1")
    one = opened(Files(folder=tmp_path / "data"))
    assert one.current().names.dns == ("node-1.example",)
    (tmp_path / "next").symlink_to("data2")
    (tmp_path / "next").replace(tmp_path / "data")
    assert one.current().names.dns == ("node-2.example",)


def test_an_intermediate_authority_may_stand_in_the_file(tmp_path: Path) -> None:
    root = trustme.CA()
    leaf = root.create_child_ca().issue_cert("node.example")
    files = Files(folder=tmp_path)
    chain = b"".join(part.bytes() for part in leaf.cert_chain_pems)
    files.put(cert=chain, key=leaf.private_key_pem.bytes(), ca=root.cert_pem.bytes())
    assert opened(files).current().names.dns == ("node.example",)
    files.put(cert=leaf.cert_chain_pems[0].bytes())
    with pytest.raises(ConfigError, match="unable to get local issuer certificate"):
        opened(files)


def test_many_threads_ask_at_once(authority: Authority, files: Files) -> None:
    """gRPC asks from threads of its own, before each handshake."""
    one = opened(files)
    pairs = [authority.issue("node.example") for _ in range(8)]
    halves: list[str] = []

    def ask() -> None:
        for _ in range(30):
            found = one.current()
            if (found.chain, found.key) not in [*pairs, (first.chain, first.key)]:
                halves.append("the certificate of one with the key of another")

    first = one.current()
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for cert, key in pairs:
        files.put(cert=cert)
        files.put(key=key)
    for thread in threads:
        thread.join()
    assert not halves and one.current().chain == pairs[-1][0]
