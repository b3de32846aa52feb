"""Measure KV offload and compare it with its targets.

    python -m bench.offload [--json FILE] [--quick] [--only NAME ...]

Runs `bench.offload_copies`, `bench.tiered_decode` and `bench.offload_cluster`, each in a process of its own. The first two are
judged on a GPU only; the third runs on CPUs. The exit code is 1 if a target is missed or a benchmark
fails. ``--quick`` checks no target.
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from bench.offload_copies import TARGET_RATIO
from bench.suite import run_command
from bench.table import Content, Outcome, Run
from bench.tiered_decode import TARGET_BESIDE_SAVES, TARGET_OF_LINK

RUNS = (
    Run(module="offload_copies", timeout_s=200.0),
    Run(module="tiered_decode", timeout_s=300.0),
    Run(module="offload_cluster", timeout_s=600.0),
)
MIN_RESTORED_TOKENS = 2000  # from so many tokens on restoring has to be quicker than prefilling


def outcomes_of(module: str, content: Content, *, has_gpu: bool) -> list[Outcome]:
    """The lines that a report gives."""
    match module:
        case "offload_copies":
            rows = [row for row in content["rows"] if "in order" in row["what"]]
            return [
                Outcome(
                    what=f"{row['case']}",
                    measured=row["ratio"],
                    limit=TARGET_RATIO if has_gpu else None,
                    unit="of a plain pinned copy" if has_gpu else "of a memcpy",
                )
                for row in rows
            ]
        case "tiered_decode":
            steps = [row for row in content["rows"] if row["what"] == "step"]
            found = [
                Outcome(
                    what=f"decode step, {row['case']}",
                    measured=1 / row["ratio"],
                    limit=1 / TARGET_OF_LINK if has_gpu else None,
                    bound="below",
                    unit="x what its bytes take on the link",
                )
                for row in steps
            ]
            limit = TARGET_BESIDE_SAVES if has_gpu else None
            beside = content["ratio_beside_saves"]
            return [*found, Outcome(what="decode beside saves", measured=beside, limit=limit, unit="of the tokens/s without")]
        case _:
            lengths = {
                int(name.rpartition("_")[2]): value for name, value in content.items() if name.startswith("restore_speed_up")
            }
            facts = content["facts"]["equal prefixes"]
            return [
                *(
                    Outcome(
                        what=f"restore a prompt of {length:,} tokens",
                        measured=value,
                        limit=1.0 if length >= MIN_RESTORED_TOKENS else None,
                        unit="x as fast as prefill, to the first token",
                    )
                    for length, value in sorted(lengths.items())
                ),
                Outcome(
                    what="prompts that share 90 %, pages stored",
                    measured=content["stored_over_once"],
                    limit=1.0,
                    bound="exactly",
                    unit="of the shared prefix once and the rest",
                    note=f"{facts['pages stored']:,} of {facts['pages of all prompts']:,} pages",
                ),
            ]


def main() -> int:
    return run_command(RUNS, partial(outcomes_of, has_gpu=torch.cuda.is_available()), title="kvferry: targets of KV offload")


if __name__ == "__main__":
    sys.exit(main())
