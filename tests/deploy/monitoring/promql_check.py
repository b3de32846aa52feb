"""Check PromQL against the declared metrics of the nodes: names, labels, kinds, and sides that never match."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import promql_parser

from transfer.config import DecodeNodeConfig, PrefillNodeConfig, settings
from transfer.metrics import NODE_METRICS, RANK_METRICS, MetricSpec

OF_THE_SCRAPE: Final = frozenset({"job", "instance"})
OF_EVERY_METRIC: Final = frozenset({"role"})

_OF_COUNTERS: Final = {"rate", "irate", "increase", "resets"}
_SETS: Final = {"and", "or", "unless"}


class Shown(NamedTuple):
    """Kind ("counter" or "gauge") and labels of the samples with one name."""

    kind: str
    labels: frozenset[str]


OF_PROMETHEUS: Final = {
    "up": Shown(kind="gauge", labels=OF_THE_SCRAPE),
    "ALERTS": Shown(kind="gauge", labels=OF_THE_SCRAPE | {"role", "alertname", "alertstate", "severity"}),
}
"""Metrics that Prometheus adds."""


def _shown_names(spec: MetricSpec) -> Iterator[tuple[str, str, set[str]]]:
    match spec.kind:
        case "counter":
            yield f"{spec.name}_total", "counter", set()
        case "histogram":
            yield f"{spec.name}_bucket", "counter", {"le"}
            yield f"{spec.name}_sum", "counter", set()
            yield f"{spec.name}_count", "counter", set()
        case _:
            yield spec.name, "gauge", set()


def _declared() -> dict[str, Shown]:
    """Return the samples of leaders and ranks by name. Series of ranks have the label ``rank``."""
    found: dict[str, Shown] = {}
    for specs, own in ((RANK_METRICS, {"rank"}), (NODE_METRICS, set[str]())):
        for spec in specs:
            for name, kind, more in _shown_names(spec):
                labels = OF_THE_SCRAPE | OF_EVERY_METRIC | own | more | set(spec.labels)
                if name in found:  # only the labels of both leaders and ranks
                    labels &= found[name].labels
                found[name] = Shown(kind=kind, labels=frozenset(labels))
    return found


DECLARED: Final = _declared() | OF_PROMETHEUS


def unknown_settings(text: str) -> set[str]:
    """Return the words of a text that begin like settings of a section, but are not settings."""
    known = {path for config in (PrefillNodeConfig, DecodeNodeConfig) for path, _ in settings(config)}
    sections = {path.partition(".")[0] for path in known if "." in path}
    return {name for name in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)\b", text) if name.partition(".")[0] in sections} - known


def parsed(expr: str) -> Any:
    """Parse an expression as Grafana sends it, because the parser does not support variables."""
    return promql_parser.parse(expr.replace("$__rate_interval", "1m"))


def selectors(expr: str) -> list[Any]:
    """Return all selectors of series in an expression, without ranges and offsets."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        match type(node).__name__:
            case "VectorSelector":
                found.append(node)
            case "MatrixSelector":
                found.append(node.vector_selector)
            case "Call":
                for argument in node.args:
                    visit(argument)
            case "BinaryExpr":
                visit(node.lhs)
                visit(node.rhs)
            case "AggregateExpr" | "ParenExpr" | "UnaryExpr":
                visit(node.expr)

    visit(parsed(expr))
    return found


def text_of(selector: Any) -> str:
    """Return a selector as a query."""
    matchers = ", ".join(f'{one.name}{_OPERATORS[str(one.op)]}"{one.value}"' for one in selector.matchers.matchers)
    return f"{selector.name}{{{matchers}}}"


_OPERATORS: Final = {
    str(promql_parser.MatchOp.Equal): "=",
    str(promql_parser.MatchOp.NotEqual): "!=",
    str(promql_parser.MatchOp.Re): "=~",
    str(promql_parser.MatchOp.NotRe): "!~",
}


def labels_of(expr: str) -> frozenset[str]:
    """Return the labels that the series of an expression may have.

    Raises:
        AssertionError: The expression has faults or is a number.
    """
    check = _Check(expr)
    labels = check.labels_of(parsed(expr))
    assert not check.wrong, check.wrong
    assert labels is not None, f"{expr} is a number"
    return labels


def faults(expr: str) -> list[str]:
    """Return the errors of an expression about the declared metrics, one line each."""
    check = _Check(expr)
    check.labels_of(parsed(expr))
    return check.wrong


class _Check:
    """Visitor of one expression; it collects errors in `wrong`."""

    def __init__(self, expr: str) -> None:
        self._expr = expr
        self.wrong: list[str] = []

    def labels_of(self, node: Any) -> frozenset[str] | None:
        """Check a part of the expression and its children; return its labels, or None for a number."""
        match type(node).__name__:
            case "VectorSelector":
                return self._selected(node, "gauge")
            case "MatrixSelector":
                return self._selected(node.vector_selector, "gauge")
            case "Call":
                return self._called(node)
            case "AggregateExpr":
                return self._grouped(node, self.labels_of(node.expr) or frozenset())
            case "BinaryExpr":
                return self._joined(node, self.labels_of(node.lhs), self.labels_of(node.rhs))
            case "ParenExpr" | "UnaryExpr":
                return self.labels_of(node.expr)
            case "NumberLiteral" | "StringLiteral":
                return None
            case other:
                raise AssertionError(f"{other} in {self._expr}: add support for it to this test")

    def _called(self, node: Any) -> frozenset[str] | None:
        found: list[frozenset[str] | None] = []
        for argument in node.args:
            if type(argument).__name__ == "MatrixSelector":
                kind = "counter" if node.func.name in _OF_COUNTERS else "gauge"
                found.append(self._selected(argument.vector_selector, kind))
            else:
                found.append(self.labels_of(argument))
        series = [labels for labels in found if labels is not None]
        if not series:
            return None
        match node.func.name:
            case "histogram_quantile":
                return series[0] - {"le"}
            case "absent":  # its labels are those of equality matchers
                (argument,) = node.args
                return frozenset(one.name for one in argument.matchers.matchers if one.op == promql_parser.MatchOp.Equal)
            case _:
                return series[0]

    def _selected(self, node: Any, kind: str) -> frozenset[str]:
        shown = DECLARED.get(node.name)
        if shown is None:
            self.wrong.append(f"{node.name} is not a metric")
            return frozenset()
        if shown.kind != kind:
            self.wrong.append(f"{node.name} is a {shown.kind}, but is read as a {kind}")
        for matcher in node.matchers.matchers:
            if matcher.name not in shown.labels:
                self.wrong.append(f"{node.name} has no label {matcher.name}")
        return shown.labels

    def _grouped(self, node: Any, labels: frozenset[str]) -> frozenset[str]:
        by = frozenset(node.modifier.labels) if node.modifier is not None else frozenset[str]()
        missing = sorted(by - labels)
        self.wrong.extend(f"no label {label} to group by in {node.prettify()}" for label in missing)
        return by

    def _joined(self, node: Any, left: frozenset[str] | None, right: frozenset[str] | None) -> frozenset[str] | None:
        if left is None or right is None:
            return left if right is None else right
        if str(node.op) == "or":
            return left | right
        matching = node.modifier.matching if node.modifier is not None else None
        named = frozenset(matching.labels) if matching is not None else frozenset[str]()
        if matching is not None and matching.type == promql_parser.LabelModifierType.Include:
            missing = named - (left & right)
            self.wrong.extend(f"one side has no label {label} in {node.prettify()}" for label in sorted(missing))
            is_many = node.modifier.card == promql_parser.VectorMatchCardinality.ManyToOne
            return left if is_many or str(node.op) in _SETS else named
        if left - named != right - named:
            self.wrong.append(f"sides differ by {sorted((left - named) ^ (right - named))} in {node.prettify()}")
        return left
