"""``python -m deploy.helm`` writes the rendered overlays into the chart. It needs kubectl, or kustomize."""

from __future__ import annotations

import shutil

from deploy.helm import OVERLAYS, file_of, rendered

if __name__ == "__main__":
    program = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    for overlay in OVERLAYS:
        file_of(overlay).write_text(rendered(overlay, program), encoding="utf-8")
        print(file_of(overlay))
