"""systemd accepts the units of deploy/systemd, and the daemons accept the example settings."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from node_runtime import exit_codes, until_ready
from node_runtime.supervisor import STOP_GRACE_S
from tests.authority import Authority, Files
from tests.deploy.manifests.containers import check_config, variables_of

SYSTEMD = Path(__file__).resolve().parents[3] / "deploy" / "systemd"
ROLES = ("prefill", "decode")
MOST_EXPOSED = 25
"""Maximum exposure, of 100, by `systemd-analyze security`: network, devices and code that is compiled at run time."""


def unit_text(role: str) -> str:
    return (SYSTEMD / f"kvferry-{role}@.service").read_text(encoding="utf-8")


def unit(role: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False, delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(unit_text(role))
    return found


def analyze(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which("systemd-analyze")
    if path is None:
        pytest.skip("systemd-analyze is not installed; on Debian or Ubuntu: apt-get install --no-install-recommends systemd")
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def installed(role: str, folder: Path) -> Path:
    """Write the unit of node `a` with the paths of this environment; return its file."""
    file = folder / f"kvferry-{role}@a.service"
    file.write_text(unit_text(role).replace("/opt/kvferry/bin", str(Path(sys.executable).parent)), encoding="utf-8")
    return file


@pytest.mark.parametrize("role", ROLES)
def test_systemd_accepts_each_unit_and_its_exposure(role: str, tmp_path: Path) -> None:
    file = installed(role, tmp_path)
    checked = analyze("verify", "--man=no", str(file))
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    checked = analyze("security", "--offline=yes", "--no-pager", f"--threshold={MOST_EXPOSED}", str(file))
    assert checked.returncode == 0, checked.stdout
    file.write_text(file.read_text(encoding="utf-8").replace("ProtectSystem=strict", "ProtectSytem=strict"), encoding="utf-8")
    assert "ProtectSytem" in analyze("verify", "--man=no", str(file)).stderr


@pytest.mark.parametrize("role", ROLES)
def test_each_unit_matches_the_exit_codes_and_the_drain_timeout(role: str) -> None:
    assert unit_text("decode") == unit_text("prefill").replace("prefill", "decode")
    service = unit(role)["Service"]
    assert service["Restart"] == "on-failure"
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == {exit_codes.BAD_INPUT, exit_codes.DOES_NOT_FIT}
    drain_s = yaml.safe_load((SYSTEMD / f"{role}-a.yaml").read_text(encoding="utf-8"))["drain_timeout_s"]
    assert int(service["TimeoutStopSec"]) >= drain_s + 2 * STOP_GRACE_S
    assert service["KillMode"] == "mixed"  # the leader ends the ranks
    assert service["LimitMEMLOCK"] == "infinity" and service["NoNewPrivileges"] == "yes"
    user = re.findall(r"^u (\S+)", (SYSTEMD / "kvferry.sysusers").read_text(encoding="utf-8"), re.M)
    assert user == [service["User"]] == [service["Group"]]


@pytest.mark.parametrize("role", ROLES)
def test_starting_a_unit_waits_for_its_node(role: str) -> None:
    """The unit sets a ready file in a writable folder and waits for it. A missing peer tier does not stop the node."""
    service = unit(role)["Service"]
    (ready_file,) = re.findall(r"^Environment=KVFERRY_READY_FILE=(.+)$", unit_text(role), re.M)
    assert Path(ready_file).parent == Path("%t") / service["RuntimeDirectory"]
    assert "KVFERRY_READY_FILE" in variables_of(role)
    assert service["ExecStartPost"].startswith("-")  # the node continues even if the wait fails
    program, flag, module, *arguments, wait_s = shlex.split(service["ExecStartPost"].removeprefix("-"))
    assert (program, flag, module) == ("/opt/kvferry/bin/python", "-m", until_ready.__spec__.name)
    assert arguments == ["${KVFERRY_READY_FILE}", "${MAINPID}"]
    minutes = int(service["TimeoutStartSec"].removesuffix("min"))
    assert minutes * 60 > int(wait_s)  # otherwise systemd would stop the node
    assert "ready_file" not in yaml.safe_load((SYSTEMD / f"{role}-a.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ROLES)
def test_check_config_accepts_the_example_settings(
    role: str, model: Path, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test runs the unit's command line with paths of this machine."""
    service = unit(role)["Service"]
    program, *arguments = shlex.split(service["ExecStart"].replace("%i", "a"))
    assert program == f"/opt/kvferry/bin/{role}-node"
    for line in (SYSTEMD / "prefill-a.env").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            monkeypatch.setenv(*line.split("=", 1))
    example = (SYSTEMD / f"{role}-a.yaml").read_text(encoding="utf-8")
    assert f"To {arguments[-1]}, for kvferry-{role}@a." in example
    names = {"prefill": "prefill.kvferry.internal", "decode": "decode.kvferry.internal"}
    files = Files(folder=tmp_path / "tls")
    files.folder.mkdir()
    chain, key = authority.issue(names[role])
    files.put(cert=chain, key=key, ca=authority.pem)
    for kind, path in (("crt", files.cert), ("key", files.key)):
        example = example.replace(f"/etc/kvferry/tls/{role}.{kind}", str(path))
    here = example.replace("/etc/kvferry/tls/ca.crt", str(files.ca)).replace("/srv/kvferry/model", str(model))
    file = tmp_path / "settings.yaml"
    file.write_text(here, encoding="utf-8")
    check_config(role, [*arguments[:-1], str(file)])
