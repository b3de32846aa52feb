"""Contents of the wheel, and its requirements and pins."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = {"transfer", "planner", "node_runtime", "embedded_engine", "prefill_node", "decode_node", "kvferry"}


def _distribution(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;@]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _requirements() -> list[str]:
    project = PYPROJECT["project"]
    of_the_site = (ROOT / "docs" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
        *(line for line in of_the_site if not line.startswith("#")),
    ]


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.partition("==") for line in lines if line and not line.startswith("#")]
    return {_distribution(name): version for name, _, version in pins}


def test_the_wheel_contains_only_our_packages() -> None:
    settings = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    found = find_packages(where=str(ROOT), include=settings["include"])
    assert {name.partition(".")[0] for name in found} <= PACKAGES
    assert {"transfer", "transfer.transport"} <= set(found)


def test_every_folder_with_code_is_a_package_and_no_folder_of_tests_is() -> None:
    """Without an `__init__.py` a folder works from the checkout and is missing from the wheel."""
    folders = {file.parent for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_requirements_are_lower_bounds() -> None:
    versions = [one.partition(";")[0] for one in _requirements()]
    assert [one for one in versions if "==" in one or "<" in one or ">=" not in one] == []


def test_every_requirement_is_pinned_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines)  # no local version such as +cpu
    assert len(_pins()) == len(lines)
    # torch of the host requires cuda-bindings of its own CUDA major, so one file cannot pin it.
    assert {_distribution(one) for one in _requirements()} - set(_pins()) == {"cuda-bindings"}


def test_the_oldest_versions_of_transports_are_the_same_for_both_cuda_majors() -> None:
    """The package `nixl` is not required, because it installs both majors. The version of ucxx is the one in the code."""
    source = (ROOT / "transfer" / "transport" / "ucx_library.py").read_text(encoding="utf-8")
    (oldest,) = re.findall(r"needs ucxx ([\d.]+) or newer", source)
    assert {one for one in _requirements() if one.startswith("ucxx")} == {f"ucxx-cu{major}>={oldest}" for major in (12, 13)}
    assert {one for one in _requirements() if one.startswith("nixl")} == {f"nixl-cu{major}>=1.5.1" for major in (12, 13)}


def test_mypy_checks_all_our_code() -> None:
    others = {"bench", "deploy", "examples", "docs/chart.py", "docs/models", "docs/site_hooks.py", "docs/tables.py", "fuzz"}
    assert PACKAGES | others == set(PYPROJECT["tool"]["mypy"]["files"])


def test_pyproject_and_transfer_declare_the_same_version() -> None:
    declared = re.search(r'^__version__ = "(.+)"$', (ROOT / "transfer" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared is not None
    assert declared.group(1) == PYPROJECT["project"]["version"]
