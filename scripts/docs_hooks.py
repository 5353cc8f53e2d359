"""What the documentation site has beyond the pages in docs/: hooks for mkdocs (see mkdocs.yml).

README is the first page and CHANGELOG one of the others. Files of the repository that a page links to
(records, tests) are published beside the pages, so that their links hold without knowing where the
repository is hosted. ``docs/api.md`` is written out for those who read it in the repository; on the site
mkdocstrings makes it, of the same names.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
import render_api  # noqa: E402

PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Pages that lie outside of docs/, and what they are called on the site."""

RESULT = "{heading_level: 4, show_if_no_docstring: true, filters: ['!^_']}"
"""How a result is shown: with all of its fields."""

LINK = re.compile(r"(?<=\]\()([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie elsewhere, and the files that pages link to."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        texts.append(text)
        files.append(File.generated(config, page, content=site_links(text, "")))
    for path in sorted({place(link, folder="docs") for text in texts for link in LINK.findall(text)}):
        if path.split("/")[0] not in ("docs", *PAGES) and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links out of docs/ to where their targets are on the site."""
    if page.file.src_uri == "api.md":
        return public_functions()
    return markdown if page.file.src_uri in PAGES.values() else site_links(markdown, "docs")


def on_page_content(html: str, **_: Any) -> str:
    """Show the roles of docstrings as the names that they stand for."""
    return re.sub(r":\w+:<code>~?([^<]+)</code>", r"<code>\1</code>", html)


def site_links(text: str, folder: str) -> str:
    """Return a page of the repository's ``folder`` with its links as they are on the site."""

    def moved(match: re.Match[str]) -> str:
        path = place(match[1], folder)
        if path in PAGES:
            return PAGES[path]
        return path.removeprefix("docs/") if "://" not in match[1] else match[1]

    return LINK.sub(moved, text)


def place(link: str, folder: str) -> str:
    """Return a link's target from the repository's root on."""
    if link.startswith("../"):
        return link[3:]
    return f"{folder}/{link}" if folder else link


def public_functions() -> str:
    """Return the page of the public names, for mkdocstrings."""
    import vllm_compat

    parts = [render_api.INTRODUCTION]
    for name in render_api.RETURNED:
        signature = "\n".join(render_api.signature(name, getattr(vllm_compat, name)))
        parts.append(f"## {name}\n\n```python\n{signature}\n```\n\n::: vllm_compat.{name}\n")
    parts.append("## Results\n")
    for name in dict.fromkeys(render_api.RETURNED.values()):
        parts.append(f"### {name}\n\n::: vllm_compat.{name}\n    options: {RESULT}\n")
    parts.append("## errors\n\n::: vllm_compat.errors\n")
    return "\n".join(parts)
