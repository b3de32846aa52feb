"""Which GPUs of this machine reach each other's memory, which is what `cuda_ipc` needs and `ucx` is fast with."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from kvferry.doctor.finding import Finding, ok, warn

NAME: Final = "gpu peer access"
_CHILD_S: Final = 60.0  # torch and its first look at the devices take seconds, many where the machine is busy
_SHOWN_PAIRS: Final = 6
_SCRIPT: Final = """
import json, torch
count = torch.cuda.device_count()
reach = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
print(json.dumps({"names": [torch.cuda.get_device_name(one) for one in range(count)], "reach": reach}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccess:
    """GPUs in torch's order.

    Args:
        names: Of each.
        reach: reach[a][b]: whether a reads and writes b's memory.
    """

    names: tuple[str, ...]
    reach: tuple[tuple[bool, ...], ...]


def look_at_peers() -> PeerAccess | str:
    """Ask torch in a process of its own, because CUDA stays in one that has looked; return why it cannot be known, if so."""
    try:
        run = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=_CHILD_S)
    except subprocess.TimeoutExpired:
        return f"torch did not answer within {_CHILD_S:g} s"
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines()
        return lines[-1] if lines else f"torch ended with {run.returncode}"
    return parse_peers(run.stdout)


def parse_peers(text: str) -> PeerAccess | str:
    """What the other process wrote; its last line counts, for libraries may have written others."""
    try:
        content = json.loads(text.strip().splitlines()[-1])
        return PeerAccess(names=tuple(content["names"]), reach=tuple(tuple(map(bool, row)) for row in content["reach"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return f"torch's answer is not understood: {text[:200]!r}"


def check_peers(found: PeerAccess | str) -> Finding:
    """One finding for all pairs."""
    if isinstance(found, str):
        return warn(NAME, f"not known: {found}", "nvidia-smi topo -p2p r, and see the line about the gpu")
    count = len(found.names)
    if count == 0:
        return warn(
            NAME, "torch sees no GPU, though there is one", "unset CUDA_VISIBLE_DEVICES; nvidia-smi tells whether it works"
        )
    what = ", ".join(f"{found.names.count(name)} x {name}" for name in dict.fromkeys(found.names))
    if count == 1:
        return ok(NAME, f"{what}: none to reach")
    missing = [f"{a}-{b}" for a in range(count) for b in range(count) if not found.reach[a][b]]
    if not missing:
        return ok(NAME, f"{what}: each reaches every other")
    more = f" and {len(missing) - _SHOWN_PAIRS} more" if len(missing) > _SHOWN_PAIRS else ""
    text = (
        f"{what}: not {', '.join(missing[:_SHOWN_PAIRS])}{more}; between those there is no cuda_ipc, and ucx copies over the host"
    )
    return warn(
        NAME, text, "nvidia-smi topo -p2p r tells why; without NVLink: iommu=pt and ACS off (setpci), in a VM its PCI topology"
    )
