"""Run mypy on the package as it is once installed.

`passes/` and `templates/` sit at the top of the repository and are mapped into the package by
setuptools, which mypy does not know. A folder of links shows it the mapped layout; the paths that
it prints are turned back into those of the repository.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("passes", "templates")


def link_package(package: Path) -> None:
    """Fill `package` with links to what setuptools would put in it."""
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        old.unlink()
    entries = [p for p in (ROOT / "hsa_compile").iterdir() if p.name != "__pycache__"]
    for entry in entries + [ROOT / name for name in MAPPED]:
        (package / entry.name).symlink_to(entry)


def main() -> int:
    tree = ROOT / "build" / "types"
    link_package(tree / "hsa_compile")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy"),
            *("--config-file", str(ROOT / "pyproject.toml")),
            *("--cache-dir", str(ROOT / ".mypy_cache")),
            *("--package", "hsa_compile"),
            *sys.argv[1:],
        ],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in done.stdout.splitlines():
        for name in MAPPED:
            line = line.replace(f"hsa_compile/{name}/", f"{name}/", 1)
        print(line)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
