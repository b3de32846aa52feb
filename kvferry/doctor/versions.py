"""Whether the packages that are installed are those that kvferry asks for, and those that it was tested with."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

import kvferry
from kvferry.doctor.finding import Finding, fail, ok, read_line, warn

NAME: Final = "versions"
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?>=([0-9!.]+)(?:;.*)?")
_PIN: Final = re.compile(r"([A-Za-z0-9._-]+)==(\S+)")
_SHOWN: Final = 8


def required_versions() -> dict[str, str]:
    """The oldest version of each package that kvferry asks for always, by name; empty where kvferry itself is not installed."""
    try:
        requirements = metadata.requires("kvferry") or []
    except metadata.PackageNotFoundError:
        return {}
    return parse_requirements(requirements)


def parse_requirements(requirements: Sequence[str]) -> dict[str, str]:
    """Those of extras are left out."""
    found = (_REQUIREMENT.fullmatch(one.replace(" ", "")) for one in requirements if "extra==" not in one.replace(" ", ""))
    return {_name(match[1]): match[2] for match in found if match}


def pinned_versions() -> dict[str, str]:
    """What was tested together (constraints.txt), by name; empty where kvferry runs without its source tree."""
    return parse_pins(read_line(Path(kvferry.__file__).parents[1] / "constraints.txt") or "")


def parse_pins(text: str) -> dict[str, str]:
    found = (_PIN.fullmatch(line.strip()) for line in text.splitlines())
    return {_name(match[1]): match[2] for match in found if match}


def check_versions(version_of: Callable[[str], str | None], required: Mapping[str, str], tested: Mapping[str, str]) -> Finding:
    """Too old is a fault; another one than the tested is said, for whoever looks for the reason of something strange.

    Args:
        version_of: The installed version of a package; None: it is not installed, which is for another check.
        required: Oldest versions.
        tested: Those of constraints.txt.
    """
    here = {name: version for name in {*required, *tested} if (version := version_of(name)) is not None}
    old = sorted(name for name in required if name in here and _numbers(here[name]) < _numbers(required[name]))
    if old:
        text = ", ".join(f"{name} {here[name]} is older than {required[name]}" for name in old)
        return fail(NAME, text, f"pip install -c constraints.txt --upgrade {' '.join(old)}")
    if not tested:
        return ok(NAME, "none is older than kvferry asks for (no constraints.txt here to tell which were tested)")
    # "2.13.0+cpu" is 2.13.0 of another index: a pin without such a suffix takes both.
    others = sorted(name for name in tested if name in here and here[name].partition("+")[0] != tested[name].partition("+")[0])
    if not others:
        return ok(NAME, f"{sum(name in tested for name in here)} packages, all as tested together (constraints.txt)")
    shown = ", ".join(f"{name} {here[name]} (tested: {tested[name]})" for name in others[:_SHOWN])
    more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
    return warn(NAME, f"not as tested together: {shown}{more}", f"pip install -c constraints.txt {' '.join(others)}")


def _name(written: str) -> str:
    """One spelling for all that name the same package."""
    return re.sub(r"[-_.]+", "-", written).lower()


def _numbers(version: str) -> tuple[int, ...]:
    """The release part, as numbers: "2.13.0rc1+cpu" is (2, 13, 0); an epoch such as "10!" comes first."""
    epoch, mark, rest = version.rpartition("!")
    release = re.match(r"\d+(?:\.\d+)*", rest)
    return (int(epoch) if mark else 0, *map(int, release[0].split("."))) if release else ()
