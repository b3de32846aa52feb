"""How many tokens a request has: a distribution by name, as ``lognormal:512:0.8``."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from transfer.errors import ConfigError


class LengthKind(StrEnum):
    FIXED = "fixed"
    UNIFORM = "uniform"
    LOGNORMAL = "lognormal"


FORMS: Final = "N, fixed:N, uniform:LEAST:MOST or lognormal:MEDIAN:SIGMA[:MOST]"
_MOST: Final = 10_000_000
_MOST_DIGITS: Final = 20
"""Of a number, leading zeros and all; Python makes none of some thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts, each at least 1.

    Args:
        kind: Its form.
        least: Of ``fixed`` the number itself, of ``lognormal`` 1.
        most: No draw is above it.
        median, sigma: Of ``lognormal``: half of the draws are below `median`, and the logarithm's standard deviation is `sigma`.
    """

    kind: LengthKind
    least: int = 1
    most: int = _MOST
    median: float = 0.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, what: str, text: str) -> Lengths:
        """Of one of `FORMS`.

        Args:
            what: The option that has the text, for messages.

        Raises:
            ConfigError: It has another form, or a number that cannot be.
        """
        kind, _, rest = text.partition(":") if ":" in text else ("fixed", "", text)
        parts = rest.split(":")
        try:
            match kind, parts:
                case "fixed", [number]:
                    return cls(kind=LengthKind.FIXED, least=_tokens(number), most=_tokens(number))
                case "uniform", [least, most]:
                    made = cls(kind=LengthKind.UNIFORM, least=_tokens(least), most=_tokens(most))
                    if made.least > made.most:
                        raise ValueError(f"{made.least} is above {made.most}")
                    return made
                case "lognormal", [median, sigma, *most] if len(most) <= 1:
                    bound = _tokens(most[0]) if most else _MOST
                    return cls(kind=LengthKind.LOGNORMAL, most=bound, median=_tokens(median), sigma=_sigma(sigma))
                case _:
                    raise ValueError("it has another form")
        except ValueError as error:
            raise ConfigError(f"{what} is {text!r}: {error}; give {FORMS}") from None

    def draw(self, chance: random.Random) -> int:
        match self.kind:
            case LengthKind.FIXED:
                return self.least
            case LengthKind.UNIFORM:
                return chance.randint(self.least, self.most)
            case LengthKind.LOGNORMAL:
                return max(1, min(self.most, round(chance.lognormvariate(math.log(self.median), self.sigma))))

    @property
    def text(self) -> str:
        """As `parse` takes it."""
        match self.kind:
            case LengthKind.FIXED:
                return f"fixed:{self.least}"
            case LengthKind.UNIFORM:
                return f"uniform:{self.least}:{self.most}"
            case LengthKind.LOGNORMAL:
                bound = "" if self.most == _MOST else f":{self.most}"
                return f"lognormal:{self.median:g}:{self.sigma:g}{bound}"


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and 1 <= int(text) <= _MOST):
        raise ValueError(f"{text!r} is no number of tokens from 1 to {_MOST}")
    return int(text)


def _sigma(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and 0 <= value <= 10):
        raise ValueError(f"sigma is {text}; it must be from 0 to 10")
    return value
