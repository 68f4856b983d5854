"""Hooks of MkDocs: what belongs to the site and does not lie in this folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

RESULTS = Path(__file__).parent.parent / "results"
_LEADS_OUT = re.compile(r"(!?\[([^\]]*)\])\(\.\./([^)]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Take the committed report and its figures into the site, as `results/...`."""
    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".html", ".svg"):
            name = f"{RESULTS.name}/{path.name}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Fit links that lead out of this folder, which are right where the repository is read."""

    def on_site(link: re.Match[str]) -> str:
        label, text, path = link.groups()
        if files.get_file_from_path(path.partition("#")[0]) is not None:
            return f"{label}({path})"
        in_table = link.string[: link.start()].rpartition("\n")[2].startswith("|")
        return text if in_table else f"{text} (`{path}`)"  # cells are narrow

    in_subfolder = "/" in page.file.src_uri
    return markdown if in_subfolder else _LEADS_OUT.sub(on_site, markdown)
