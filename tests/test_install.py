"""The package as it is found once installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def in_fresh_process(code: str) -> str:
    """What `code` prints in a new Python process that sees the installed package only."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=os.environ["HSA_TEST_CACHE"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_backend_is_listed_without_an_import_of_ours():
    printed = in_fresh_process(
        "import sys, torch\n"
        "assert 'hsa' in torch._dynamo.list_backends()\n"
        "assert 'hsa_compile' not in sys.modules\n"
        "print('listed')"
    )
    assert printed == "listed"


def test_backend_works_by_name_in_a_fresh_process():
    """A module without attention comes through unchanged; only the name of the backend is given."""
    printed = in_fresh_process(
        "import torch\n"
        "x = torch.randn(3, 4)\n"
        "f = torch.compile(lambda x: x.sin() + 1, backend='hsa', options={'run': 'eager'})\n"
        "torch.testing.assert_close(f(x), x.sin() + 1)\n"
        "print('ran')"
    )
    assert printed == "ran"


def test_passes_and_templates_are_parts_of_the_package():
    printed = in_fresh_process(
        "import hsa_compile.passes, hsa_compile.templates\n"
        "from importlib.resources import files\n"
        "names = [p.name for p in files('hsa_compile.templates').iterdir()]\n"
        "print(*sorted(n for n in names if n.endswith('.py.jinja')))"
    )
    assert printed.split() == sorted(p.name for p in (ROOT / "templates").glob("*.py.jinja"))


def test_every_package_folder_is_declared():
    """A folder added to the tree and not to pyproject.toml would be missing from the wheel only."""
    declared = set()
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if line.strip().startswith('"hsa_compile') and line.strip().endswith('",'):
            declared.add(line.strip().strip('",'))
    found = {"hsa_compile", "hsa_compile.passes", "hsa_compile.templates"}
    for folder in ("hsa_compile", "passes", "templates"):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            found.add(".".join(parts if folder == "hsa_compile" else ("hsa_compile", *parts)))
    assert declared == found


@pytest.mark.slow
def test_wheel_holds_passes_and_templates(tmp_path):
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left_out)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("hsa_compile-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "passes").glob("*.py"):
        assert f"hsa_compile/passes/{path.name}" in names
    for path in (ROOT / "templates").glob("*.py.jinja"):
        assert f"hsa_compile/templates/{path.name}" in names
    assert any(name.endswith("entry_points.txt") for name in names)
