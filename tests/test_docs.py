"""Every Python block of the documentation runs as it is printed.

Blocks fenced as ```python run, in order, those of one file in one namespace; ```python no-run is
shown only, and so is every other language.
"""

from __future__ import annotations

import linecache
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest

from hsa_compile import algorithms

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<info>[^\n`]*)\n(?P<body>.*?)^[ \t]*```[ \t]*$", re.M | re.S
)

PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")]
    if path.exists()
)


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The runnable blocks of a page and the line each starts at."""
    blocks = []
    for match in FENCE.finditer(text):
        if match["info"].split() == ["python"]:
            line = text.count("\n", 0, match.start("body"))
            blocks.append((line, textwrap.dedent(match["body"])))
    return blocks


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page_" + re.sub(r"\W", "_", name_of(page)))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # What a page registers is known for its length.
    monkeypatch.setattr(algorithms, "_ALGORITHMS", dict(algorithms._ALGORITHMS))
    for line, block in python_blocks(page.read_text(encoding="utf-8")):
        # Blank lines in front make tracebacks, and Dynamo's, point at the line of the page.
        source = "\n" * line + block
        linecache.cache[str(page)] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            str(page),
        )
        exec(compile(source, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_files_lead_somewhere(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_blocks_are_found():
    page = "a\n```python\nx = 1\n```\n```python no-run\n!\n```\n- b\n  ```python\n  y = x\n  ```\n```\n?\n```\n"
    assert python_blocks(page) == [(2, "x = 1\n"), (9, "y = x\n")]
