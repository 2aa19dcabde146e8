"""What mkdocs calls while it builds the site; `hooks:` in mkdocs.yml names this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page as SitePage

from docs.site.markup import documented_names, in_prose, link_names, link_notes, relink
from docs.site.navigation import expand
from docs.site.notes import ROOT
from docs.site.offline import foreign_in_site
from docs.site.pages import made_pages, page_of

__all__ = ["on_config", "on_files", "on_page_markdown", "on_post_build"]

_MADE = made_pages()
_NAMES = documented_names()


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill in the pages that mkdocs.yml asks for as `folder/*`."""
    config.nav = expand(config.nav, list(_MADE))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and the pictures of benchmarks."""
    for uri, page in _MADE.items():
        files.append(File.generated(config, uri, content=page.text()))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"performance/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: SitePage, **kwargs: Any) -> str:
    """Turn links between files into links between pages, and citations and names into links."""
    uri = page.file.src_uri
    source = _MADE[uri].source if uri in _MADE else f"docs/{uri}"

    def change(prose: str) -> str:
        return link_names(link_notes(relink(prose, source, uri, lambda path: page_of(path, _MADE))), _NAMES)

    return in_prose(markdown, change)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that needs a network to be read."""
    foreign = foreign_in_site(Path(config.site_dir))
    if foreign:
        raise PluginError("pages load what is not in the site:\n  " + "\n  ".join(foreign))
