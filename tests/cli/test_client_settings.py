"""How the commands that call a node find their certificate: flags over environment over file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cli.client_settings import client_security
from tests.authority import Authority, Files
from transfer.errors import ConfigError
from transfer.registry.security import MutualTls

FAR = "pod.example:7001"


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Authority().files(tmp_path / "tls", "client.example")


def yaml_of(files: Files, tmp_path: Path, more: str = "") -> Path:
    path = tmp_path / "client.yaml"
    names = "peer_names: [from-file.example]"
    path.write_text(f"{more}tls: {{cert_file: {files.cert}, key_file: {files.key}, ca_file: {files.ca}, {names}}}\n")
    return path


def test_each_source_is_stronger_than_the_next(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = yaml_of(files, tmp_path)
    monkeypatch.setenv("KVFERRY_MODEL", "of a node")
    for name, given in (
        ("from-file.example", None),
        ("from-environment.example", None),
        ("from-flag.example", ["from-flag.example"]),
    ):
        if name.startswith("from-env"):
            monkeypatch.setenv("KVFERRY_TLS__PEER_NAMES", name)
        security = client_security("status", FAR, file=file, peer_names=given)
        assert isinstance(security, MutualTls) and security.peer_names == (name,)
        assert security.files.current().names.dns == ("client.example",)
    assert not capsys.readouterr().err, "there is nothing to warn of"


def test_flags_alone_do(files: Files) -> None:
    security = client_security("status", FAR, cert=files.cert, key=files.key, ca=files.ca)
    assert isinstance(security, MutualTls) and security.peer_names == (), "the host of the target is what counts"


@pytest.mark.parametrize(
    ("more", "insecure", "complaint"),
    [
        ("model: here\n", 0, "model is no setting"),
        ("", 1, "tls.insecure is 1 and cert_file is "),
    ],
)
def test_what_makes_no_sense_is_refused(files: Files, tmp_path: Path, more: str, insecure: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        client_security("status", FAR, file=yaml_of(files, tmp_path, more), insecure=insecure)


def test_a_certificate_that_cannot_be_used_is_one_line(files: Files, tmp_path: Path) -> None:
    files.key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls.key_file is .*, which all users of this machine can read or write \(mode 644\)"):
        client_security("status", FAR, file=yaml_of(files, tmp_path))
