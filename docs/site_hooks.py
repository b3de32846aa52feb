"""Hooks of the documentation site: pages from outside docs/, links that work on GitHub too, and scripts without a CDN."""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
SCRIPTS: Final = ROOT / ".kvferry" / "docs-scripts"
"""Where `.ci/tools docs` puts scripts of npm packages."""

PAGES: Final = {
    "README.md": "index.md",
    "deploy/README.md": "deploy.md",
    "bench/README.md": "benchmarks.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the site that lie outside docs/, by their path in the repository."""

BOOSTS: Final = {
    **dict.fromkeys(("adr/", "changelog.md", "seeds.md", "contributing.md", "models/", "fuzzing.md"), 0.1),
    **dict.fromkeys(("api.md", "architecture.md", "benchmarks.md", "measurements.md", "simulation.md", "protocol.md"), 0.3),
    **dict.fromkeys(("memory-model.md", "offload-internals.md", "security.md"), 0.3),
    **dict.fromkeys(("troubleshooting.md", "runbooks.md", "operations.md", "upgrades.md", "discovery.md", "network.md"), 3),
    **dict.fromkeys(("configuration.md", "metrics.md"), 2),
    **dict.fromkeys(("engines.md", "vllm.md", "sglang.md"), 4),
    **dict.fromkeys(("deploy.md", "tls.md", "observability.md", "cli.md", "scaling.md"), 2),
}
"""Weights of pages in the search, by the beginnings of their names: pages for operators come before records and internals."""

_log = logging.getLogger("mkdocs.plugins.kvferry")
_LINK_OR_CODE: Final = re.compile(
    r"^(?P<fence> *(?:```+|~~~+)).*?^(?P=fence)\s*$"
    r"|(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)"
    r"|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
"""A block of code, a link or code within a line, whichever begins first; only links have a target."""

_BADGES: Final = re.compile(r"^!\[[^\]]*\]\(https://img\.shields\.io/.*\n", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Use local scripts instead of those that the theme would load from a CDN."""
    if (SCRIPTS / "mermaid.min.js").is_file() and (SCRIPTS / "iframe-worker.js").is_file():
        config.extra["polyfills"] = ["assets/iframe-worker.js"]
        config.extra_javascript.append("assets/mermaid.min.js")
    else:
        _log.warning("scripts are missing, so diagrams are shown as text and search needs a server: run .ci/tools docs")
        config.extra["polyfills"] = []
        config.mdx_configs["pymdownx.superfences"] = {}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and the scripts."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for script in config.extra["polyfills"] + [str(one) for one in config.extra_javascript]:
        files.append(File.generated(config, script, abs_src_path=str(SCRIPTS / Path(script).name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links from paths in the repository to pages of the site, or to the repository's own address."""
    boost = next((weight for name, weight in BOOSTS.items() if page.file.src_uri.startswith(name)), None)
    if boost is not None:
        page.meta["search"] = {"boost": boost}
    here = next((path for path, name in PAGES.items() if name == page.file.src_uri), f"docs/{page.file.src_uri}")

    def rewrite(link: re.Match[str]) -> str:
        path, mark, anchor = (link["target"] or "").partition("#")
        if not path or re.match(r"[a-z][a-z0-9+.-]*:", path):
            return link[0]
        in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        in_site = PAGES.get(in_repository, in_repository.removeprefix("docs/"))
        file = files.get_file_from_path(in_site) if in_repository in PAGES or in_repository.startswith("docs/") else None
        if file is not None and file.inclusion.is_included():
            relative = posixpath.relpath(in_site, posixpath.dirname(page.file.src_uri) or ".")
            return f"{link['image']}[{link['text']}]({relative}{mark}{anchor})"
        if not (ROOT / in_repository).exists():
            _log.warning("%s links to %s, which does not exist", here, path)
        source = config.extra["source_url"]
        return f"[{link['text']}]({source.rstrip('/')}/{in_repository}{mark}{anchor})" if source else str(link["text"])

    return _LINK_OR_CODE.sub(rewrite, _BADGES.sub("", markdown))
