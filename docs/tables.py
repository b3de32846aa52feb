"""Generate the text of documents and deploy/ that follows from the code, or report differences.

``python -m docs.tables --write`` (`make docs`) writes the text. ``--check`` (`make docs-check`) prints differences and fails.

Some files are generated as a whole. Other documents have generated regions between two comments:
``<!-- begin NAME: written by make docs -->`` and ``<!-- end NAME -->``. Some columns of a table contain handwritten text. The
generator keeps that text by row.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import grpc

from bench import simulate
from bench.simulation.node_settings import LARGE_GPU_BYTES, gpu_nodes
from deploy.kubernetes import PROMETHEUS_RULE, prometheus_rule
from deploy.monitoring import ALERTS, DASHBOARDS, FOLDER, RULES
from deploy.monitoring.grafana import dashboard_json
from deploy.monitoring.rule_file import rules_yaml
from docs import chart, support_matrix
from docs.cli_page import cli_page
from docs.metrics_page import metrics_page
from embedded_engine.architectures import ARCHITECTURES
from kvferry.router.metrics import ROUTER_METRICS
from node_runtime import exit_codes as codes_module
from planner.memory_advice import Phase, advice_for, settings_of
from transfer.config.__main__ import configuration_page
from transfer.errors import TransferError
from transfer.registry.status import error_of
from transfer.sizes import ring_capacity_bytes
from transfer.tracing import SPANS

ROOT: Final = Path(__file__).resolve().parents[1]

Row = list[str]


class Stale(Exception):
    """A document lacks a region or handwritten text."""


def cells_of(line: str) -> Row:
    """Return the cells of a table row; an escaped pipe does not end a cell."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def row_text(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(change: Callable[[list[Row]], list[Row]]) -> Callable[[str], str]:
    """Return a writer for a region that is one table; `change` maps its rows, without the two heading lines."""

    def write(region: str) -> str:
        heading, rule, *rows = region.strip().splitlines()
        return "\n".join([heading, rule, *(row_text(cells) for cells in change([cells_of(row) for row in rows]))]) + "\n"

    return write


def kept(rows: Sequence[Row], names: Iterable[str], *, column: int = 0) -> list[Row]:
    """Return the row of each name, in the order of `names`.

    Args:
        column: The column that holds the name, in backticks.

    Raises:
        Stale: A name has no row.
    """
    found = {row[column].strip("`"): row for row in rows}
    if missing := [name for name in names if name not in found]:
        raise Stale(f"add a row for {', '.join(missing)}, with the cells that are not generated")
    return [found[name] for name in names]


def constants_of(module: object) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if name.isupper() and not name.startswith("_")}


def exit_codes(rows: list[Row]) -> list[Row]:
    """Write the exit code of each name and the gRPC statuses that map to it; keep the meaning."""
    codes = constants_of(codes_module)
    metadata = grpc.aio.Metadata()
    statuses: dict[int, list[str]] = {}
    for status in grpc.StatusCode:
        if status is not grpc.StatusCode.OK:
            error = error_of(grpc.aio.AioRpcError(status, metadata, metadata), peer="h:1")
            assert isinstance(error, TransferError)
            statuses.setdefault(codes_module.exit_code_of(error, is_call=True), []).append(f"`{status.name}`")
    return [
        [str(code), f"`{name}`", *row[2:4], ", ".join(sorted(statuses.get(code, ())))]
        for (name, code), row in zip(codes.items(), kept(rows, codes, column=1), strict=True)
    ]


def memory_advice(rows: list[Row]) -> list[Row]:
    """Write the settings to change for each phase; keep the reaction of the node."""
    found = []
    for phase, row in zip(Phase, kept(rows, Phase), strict=True):
        text = advice_for(phase)
        for setting in settings_of(phase):
            text = text.replace(setting, f"`{setting}`")
        found.append([str(phase), text, *row[2:]])
    return found


def spans(_: list[Row]) -> list[Row]:
    def code(words: Iterable[str]) -> str:
        return ", ".join(f"`{word}`" for word in words)

    def parent(text: str) -> str:
        return code(text.split(", ")) if text.startswith("kvferry.") else text

    return [[f"`{one.name}`", one.recorded_by, parent(one.parent), one.meaning, code(one.attributes)] for one in SPANS]


def router_metrics(_: list[Row]) -> list[Row]:
    found = []
    for spec in ROUTER_METRICS:
        labels = f"{{{', '.join(spec.labels)}}}" if spec.labels else ""
        found.append([f"`{spec.shown_name}{labels}`", spec.help])
    return found


def families(rows: list[Row]) -> list[Row]:
    """Write whether tensor parallelism divides a family; keep its stored state and a remark after the comma."""
    found = []
    for name, keeps, is_cut in kept(rows, ARCHITECTURES):
        _, comma, remark = is_cut.partition(",")
        found.append([name, keeps, ("yes" if ARCHITECTURES[name.strip("`")].is_cut else "no") + comma + remark])
    return found


BOUNDING_MODULES: Final = (
    "transfer.messages", "transfer.control.base", "transfer.registry.options", "transfer.registry.convert",
    "transfer.registry.status", "transfer.transfer_ids", "transfer.connector.prompt",
)  # fmt: skip
"""Modules whose constants MAX_... limit messages from peers and clients."""

FOLLOW_FROM_OTHERS: Final = {"MAX_TRANSFER_ID_BYTES", "_MAX_POSITION"}
"""Constants that need no row, because they follow from another limit or from the wire type."""


def message_limits(rows: list[Row]) -> list[Row]:
    """Write the value of each limit that names its constant.

    Raises:
        Stale: A constant that limits messages has no row, or a row lacks its constant or its test.
    """
    found = []
    for plane, what, limit, constant, shown_by in rows:
        if "`test_" not in shown_by:
            raise Stale(f"{what}: name a test that shows the limit")
        if constant:
            module, _, name = constant.strip("`").rpartition(".")
            limit = re.sub(r"^[\d,]+", f"{int(getattr(importlib.import_module(module), name)):,}", limit)
        elif re.match(r"[\d,]+ ", limit):
            raise Stale(f"{what}: name the constant of {limit}")
        found.append([plane, what, limit, constant, shown_by])
    named = {row[3].strip("`").rpartition(".")[2] for row in rows}
    for module in BOUNDING_MODULES:
        text = inspect.getsource(importlib.import_module(module))
        if missing := set(re.findall(r"^(_?MAX_[A-Z_]+)(?:: Final)? = ", text, re.M)) - FOLLOW_FROM_OTHERS - named:
            raise Stale(f"add a row for {', '.join(f'{module}.{name}' for name in sorted(missing))}")
    return found


def simulated_settings(rows: list[Row]) -> list[Row]:
    """Write the default of the simulator and the default of a node, for each option of the simulator."""
    simulated = vars(simulate.with_defaults(simulate.parser().parse_args([])))
    prefill, decode = gpu_nodes()
    defaults = {
        "decode-running": decode.limits.max_running_requests,
        "prefill-running": prefill.limits.max_running_requests,
        "chunk-tokens": prefill.chunk.chunk_tokens,
        "max-step-tokens": prefill.limits.max_step_tokens,
        "ring-mib": ring_capacity_bytes(decode.ring, LARGE_GPU_BYTES, device="cuda") >> 20,
        "staging-slots": prefill.staging.num_slots,
    }
    found = []
    for setting, here, default in rows:
        option = re.findall(r"\(`--([a-z-]+)`\)", setting)[0]
        here = re.sub(r"^\d+", str(simulated[option.replace("-", "_")]), here)
        found.append([setting, here, re.sub(r"^\d+", str(defaults[option]), default) if option in defaults else default])
    return found


def toy_engine(_: str) -> str:
    source = (ROOT / "examples" / "toy_engine.py").read_text(encoding="utf-8")
    return f"```python\n{source[source.index('VOCAB_SIZE = ') : source.index('async def main')].rstrip()}\n```\n"


REGIONS: Final[Mapping[str, Mapping[str, Callable[[str], str]]]] = {
    "docs/embedded-engine.md": {"families": table(families)},
    "docs/fuzzing.md": {"message-limits": table(message_limits)},
    "docs/router.md": {"router-metrics": table(router_metrics)},
    "docs/integration.md": {"toy-engine": toy_engine},
    "docs/observability.md": {"spans": table(spans)},
    "docs/operations.md": {"exit-codes": table(exit_codes)},
    "docs/simulation.md": {"simulated-settings": table(simulated_settings)},
    "docs/support.md": {"support-matrix": lambda _: support_matrix.matrix()},
    "docs/troubleshooting.md": {"memory-advice": table(memory_advice)},
}
"""Writers of regions, by document and by name of the region."""


def whole_files() -> dict[Path, str]:
    rules = rules_yaml(ALERTS)
    return {
        ROOT / "docs" / "cli.md": cli_page(),
        ROOT / "docs" / "configuration.md": configuration_page(),
        ROOT / "docs" / "metrics.md": metrics_page(),
        **{FOLDER / f"{one.name}.json": dashboard_json(one) for one in DASHBOARDS},
        RULES: rules,
        PROMETHEUS_RULE: prometheus_rule(rules),
        chart.PICTURE: chart.performance_svg(),
    }


def with_regions(text: str, writers: Mapping[str, Callable[[str], str]]) -> str:
    """Return a document with regenerated regions.

    Raises:
        Stale: A region is missing, or lacks handwritten text.
    """
    for name, write in writers.items():
        parts = re.search(rf"<!-- begin {name}:[^\n]*-->\n(.*?)<!-- end {name} -->", text, re.S)
        if parts is None:
            raise Stale(f"no region {name}")
        try:
            text = text[: parts.start(1)] + write(parts[1]) + text[parts.end(1) :]
        except Stale as reason:
            raise Stale(f"{name}: {reason}") from None
    return text


def generated() -> dict[Path, str]:
    """Return each file that is generated in whole or in part, with its generated content.

    Raises:
        Stale: A document lacks a region, or handwritten text.
    """
    found = whole_files()
    for document, writers in REGIONS.items():
        try:
            found[ROOT / document] = with_regions((ROOT / document).read_text(encoding="utf-8"), writers)
        except Stale as reason:
            raise Stale(f"{document}: {reason}") from None
    return found


def differences(files: Mapping[Path, str]) -> list[str]:
    """Return one diff for each file that differs from its generated content; a missing file counts as empty."""
    found = []
    for file, wanted in files.items():
        content = file.read_text(encoding="utf-8") if file.exists() else ""
        if content != wanted:
            name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else str(file)
            lines = difflib.unified_diff(content.splitlines(), wanted.splitlines(), name, f"{name}, generated", n=0, lineterm="")
            found.append("\n".join(lines))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tables", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--check", action="store_true", help="print differences; exit with 1 if there are any")
    group.add_argument("--write", action="store_true", help="write all files that differ")
    is_write = parser.parse_args(arguments).write
    try:
        files = generated()
    except Stale as reason:
        print(reason, file=sys.stderr)
        return 1
    if is_write:
        for file, content in files.items():
            file.write_text(content, encoding="utf-8")
        return 0
    if found := differences(files):
        print(*found, "documents differ from the code: run 'make docs' and commit the result", sep="\n", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
