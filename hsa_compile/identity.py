"""A hash of everything that shapes the generated code and is not in torch's compile-cache key.

Lowerings, templates and op bodies are ours: editing one must never be answered by code compiled before the edit.
"""

import hashlib
from importlib import resources
from pathlib import Path

_SOURCES = (".py", ".jinja", ".cpp", ".h")


def _files() -> list[Path]:
    roots = (
        resources.files("hsa_compile"),
        resources.files("hsa_compile.passes"),
        resources.files("hsa_compile.templates"),
    )
    found = {
        path for root in roots for path in Path(str(root)).rglob("*") if path.suffix in _SOURCES
    }
    return sorted(found)


def code_identity(options: str) -> str:
    """Hash of every source file and template of the package, and of the canonical options."""
    digest = hashlib.sha256(options.encode())
    for path in _files():
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
