"""Load a process's settings from file, environment and flags, and report every problem in one line."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from transfer.config import (
    ENVIRONMENT_PREFIX,
    DecodeNodeConfig,
    NodeConfig,
    PrefillNodeConfig,
    RootConfig,
    settings,
)
from transfer.errors import ConfigError
from transfer.utf8 import is_utf8

_MAX_DEPTH: Final = 8  # deeper than any setting; an alias inside itself has no end

_SERVICE_LINK: Final = re.compile(
    r"(?:[A-Z0-9_]+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS: Final = re.compile(r"(?:[A-Z0-9_]+_)?PORT")  # its value is tcp://host:port; a plain number is no address
"""What Kubernetes adds to the environment for each Service of a pod's namespace.

Source: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables.
"""

AnyConfig = TypeVar("AnyConfig", bound=RootConfig)


def load_config(
    config_type: type[AnyConfig],
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    flag_of: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    given: Mapping[str, Mapping[str, object]] | None = None,
    defaults: Mapping[str, Mapping[str, object]] | None = None,
) -> AnyConfig:
    """A node's settings, or a command's, from all sources.

    Args:
        file: YAML file.
        given: Settings that the process has from elsewhere, nested or by path, by the name of that place; as strong as a file.
        defaults: As `given`, and weaker than any other source.
        environment: Variables of the process; those that do not begin with `ENVIRONMENT_PREFIX` are ignored, and those that
            Kubernetes makes of a Service whose name begins so.
        flags: Values of the daemon's own flags by path; None means that the flag was not given.
        flag_of: Path -> flag, for errors.
        overrides: ``path=value`` texts of ``--set``; stronger than `flags`.

    Raises:
        ConfigError: Something is wrong; one line for each problem.
    """
    found = _Given(config_type)
    problems = found.problems
    found.put_all(defaults or {})
    if file is not None:
        try:
            found.put_all({str(file): _file_content(file)})
        except ConfigError as error:
            problems.append(str(error))
    found.put_all(given or {})
    for name, text in sorted((environment or {}).items()):
        rest = name.removeprefix(ENVIRONMENT_PREFIX)
        if rest != name and not _is_service_link(rest, text, found.sections):
            found.put(rest.lower().replace("__", "."), _text_value(text), name)
    for path, value in (flags or {}).items():
        if value is not None:
            found.put(path, value, (flag_of or {}).get(path, "flag"))
    for override in overrides:
        path, separator, text = override.partition("=")
        if separator and path:
            found.put(path.strip(), _text_value(text), "--set")
        else:
            problems.append(f"--set {override}: it must be path=value, for example --set pool.page_size=32")
    problems += _not_utf8(found)
    if not problems:
        try:
            return config_type.model_validate(found.tree)
        except ValidationError as error:
            problems = [_problem(config_type, dict(details), found.sources) for details in error.errors(include_url=False)]
    raise ConfigError("\n".join(problems))


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is there twice", key_node.start_mark)
            seen.add(key if isinstance(key, str) else id(key_node))
        return super().construct_mapping(node, deep=deep)


def _file_content(file: Path) -> dict[Any, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: The file cannot be read, or has other content.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"config file {file} cannot be read: {error.strerror or error}") from None
    except RecursionError:
        raise ConfigError(f"config file {file} is nested too deeply; it must hold settings, for example 'model: DIR'") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_yaml_problem(file, error)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict | None):
        kind = type(content).__name__
        raise ConfigError(f"config file {file} holds a {kind}; it must hold settings, for example 'model: DIR'")
    return content or {}


def _yaml_problem(file: Path, error: yaml.MarkedYAMLError) -> str:
    """Return the position and the problem, and below it the line of the file with a mark."""
    mark = error.problem_mark
    if mark is None:
        return f"config file {file} is not YAML: {error.problem}"
    snippet = mark.get_snippet(indent=2, max_length=100)
    return f"{file}:{mark.line + 1}:{mark.column + 1}: it is not YAML: {error.problem}" + (f"\n{snippet}" if snippet else "")


def _leaves(tree: Mapping[Any, Any], prefix: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and depth < _MAX_DEPTH:
            yield from _leaves(value, f"{path}.", depth + 1)
        else:
            yield path, value


def _not_utf8(found: _Given) -> Iterator[str]:
    """Yield one line for each value that is not UTF-8, because pydantic fails where an error message would quote it."""
    for path, value in _leaves(found.tree, ""):
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str | Path) and not is_utf8(str(text)):
                yield f"{path} is {str(text)!r} (from {found.sources.get(path, 'code')}); it must be UTF-8"


def _is_service_link(name: str, text: str, sections: frozenset[str]) -> bool:
    """Return whether Kubernetes created the variable for a Service ``kvferry-NAME``. A possible mistyped setting is not one."""
    if name.partition("_")[0].lower() in sections:
        return False
    return _SERVICE_LINK.fullmatch(name) is not None or (_SERVICE_ADDRESS.fullmatch(name) is not None and "://" in text)


def _text_value(text: str) -> object:
    """Return the meaning of a text of the environment or of --set. The setting's type converts it."""
    stripped = text.strip()
    return None if stripped.lower() in ("null", "none") else stripped


class _Given:
    """Values of all sources, in ascending order of precedence: the tree of values, and the source of each.

    A path that has a value in one source and settings inside in another is a problem, because the intent is not known.
    """

    def __init__(self, config_type: type[RootConfig]) -> None:
        self.sections = frozenset(above for path, _ in settings(config_type) for above in _and_above(path) if above != path)
        self.tree: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []

    def put_all(self, contents: Mapping[str, Mapping[Any, object]]) -> None:
        """Add settings, with the name of their source."""
        for place, content in contents.items():
            for path, value in _leaves(content, ""):
                self.put(path, value, place)

    def put(self, path: str, value: object, source: str) -> None:
        """Add one setting. An empty section, or one whose settings are all commented out (null), changes nothing."""
        if value in (None, {}) and path in self.sections:
            return
        *parents, name = path.split(".")
        section = self.tree
        for depth, parent in enumerate(parents, 1):
            inner = section.setdefault(parent, {})
            if not isinstance(inner, dict):
                above = ".".join(parents[:depth])
                self._clash(above, inner, self.sources[above], inside=path, inside_source=source)
                inner = section[parent] = {}
            section = inner
        if section.get(name) and isinstance(section[name], dict) and not isinstance(value, dict):
            inside = next(other for other in self.sources if other.startswith(f"{path}."))
            self._clash(path, value, source, inside=inside, inside_source=self.sources[inside])
        else:
            section[name] = value
            self.sources[path] = source

    def _clash(self, path: str, value: object, source: str, *, inside: str, inside_source: str) -> None:
        if path in self.sections:
            self.problems.append(f"{path} is {_shown(value)} (from {source}); it is a section, its settings are {path}.NAME")
        else:
            self.problems.append(f"{inside} is no setting (from {inside_source}); {path} is none that has others inside")


def _and_above(path: str) -> Iterator[str]:
    """Yield a path, and the paths of its sections, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _problem(config_type: type[RootConfig], details: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """Return one line: path, value, source, and the right values."""
    path = ".".join(str(part) for part in details["loc"])
    source = next((sources[above] for above in _and_above(path) if above in sources), None)
    where = f" (from {source})" if source else ""
    if details["type"] == "extra_forbidden":
        return _unknown(config_type, path, sources)
    if details["type"] == "missing":
        description = next((field.description for known_path, field in settings(config_type) if known_path == path), None)
        return f"{path} is missing; it must be given: {description}"
    if details["type"] == "value_error":
        reason = str(details["ctx"]["error"])
        if isinstance(details["input"], dict | BaseModel):
            return _with_source(f"{path}.{reason}" if path else reason, sources)
        return f"{path} is {_shown(details['input'])}{where}; {reason}"
    return f"{path} is {_shown(details['input'])}{where}; {_what_is_right(details)}"


def _with_source(problem: str, sources: Mapping[str, str]) -> str:
    """Add the source of the value to a line such as "SETTING is VALUE; it must be ...", if the line names one setting."""
    match = re.match(r"([\w.]+) is [^ ;,]+(?=[;,])", problem)
    source = match and sources.get(match[1])
    return problem if not match or not source else f"{match[0]} (from {source}){problem[match.end() :]}"


def _unknown(config_type: type[RootConfig], path: str, sources: Mapping[str, str]) -> str:
    """Return the line for an unknown setting. For an unknown section, its first given setting is named."""
    given = path if path in sources else next((other for other in sources if other.startswith(f"{path}.")), path)
    start = f"{given} is no setting (from {sources.get(given, 'code')})"
    for other in (PrefillNodeConfig, DecodeNodeConfig):
        if other is not config_type and any(known == given for known, _ in settings(other)):
            of = f"{config_type.role}-node" if issubclass(config_type, NodeConfig) else f"a {config_type.role}"
            return f"{start} of {of}; it is one of {other.role}-node"
    above, _, name = path.rpartition(".")
    prefix = f"{above}." if above else ""
    known_here = dict.fromkeys(
        known.removeprefix(prefix).partition(".")[0] for known, _ in settings(config_type) if known.startswith(prefix)
    )
    near = [f"{prefix}{known}" for known in difflib.get_close_matches(name, known_here, n=1)]
    near += [known for known, _ in settings(config_type) if known.rpartition(".")[2] == given.rpartition(".")[2]]
    source = sources.get(given, "")
    if near:
        advice = f"did you mean {near[0]}?"
    elif source.startswith(ENVIRONMENT_PREFIX) and not above:
        advice = f"{source} is not a variable of kvferry"
    else:
        advice = f"known here: {', '.join(known_here)}"
    return f"{start}; {advice}"


def _what_is_right(details: Mapping[str, Any]) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "greater_than_equal":
            return f"it must be at least {context['ge']}"
        case "greater_than":
            return f"it must be above {context['gt']}"
        case "less_than_equal":
            return f"it must be at most {context['le']}"
        case "literal_error" | "enum":
            return f"it must be one of {context['expected']}"
        case "int_parsing" | "int_type" | "int_from_float":
            return "it must be a whole number"
        case "float_parsing" | "float_type" | "finite_number":
            return "it must be a number"
        case "string_type" | "path_type":
            return "it must be text"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "it must be a section of settings"
        case "tuple_type":
            return "it must be a list"
        case _:
            message = str(details["msg"])
            return message[:1].lower() + message[1:]


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) and (not value or value != value.strip() or "\n" in value) else str(value)
    text = "null" if value is None else text
    return text if len(text) <= 80 else text[:77] + "..."
