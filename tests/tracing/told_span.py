"""A span that a test reads."""

from __future__ import annotations

from transfer.tracing import Span, Value


class ToldSpan:
    """A `Span` that records its child spans as name and error; None for open ones."""

    def __init__(self, name: str = "root") -> None:
        self.name = name
        self.error: str | None = None
        self.within: list[ToldSpan] = []
        self.values: dict[str, Value] = {}
        self.traceparent = ""

    def begin(self, name: str, **attributes: Value) -> Span:
        made = ToldSpan(name)
        self.within.append(made)
        return made

    def record(self, name: str, *, begun_s: float, ended_s: float, error: str = "", **attributes: Value) -> None:
        assert begun_s <= ended_s and self.error is None, "a span that is over gets no further call"
        self.within.append(ToldSpan(name))
        self.within[-1].end(error)

    def set(self, **attributes: Value) -> None:
        self.values |= attributes

    def end(self, error: str = "") -> None:
        if self.error is None:
            self.error = error

    @property
    def told(self) -> list[tuple[str, str | None]]:
        return [(one.name, one.error) for one in self.within]
