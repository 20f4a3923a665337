"""Policy files: JSON or YAML to plain data, and back.

Both formats let the last of two equal keys win without a word; here that is an error.
"""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hsa_compile.errors import PolicyError, did_you_mean, listed, refuse

SUFFIXES = (".json", ".yaml", ".yml")


def read_policy_file(path: Path) -> object:
    """The content of a policy file as plain data, not yet checked to be a policy.

    Args:
        path: a file whose suffix is one of ``SUFFIXES`` in any case; UTF-8.

    Raises:
        PolicyError: the file is missing, unreadable or cannot be parsed; with line and column
            where the parser knows them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        others = sorted(
            entry.name for entry in path.parent.glob("*") if entry.suffix.lower() in SUFFIXES
        )
        raise PolicyError(f"no such file{did_you_mean(path.name, others)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot be read: {error}") from error
    return _parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text)


def write_policy_file(path: Path, content: Mapping[str, Any], note: str = "") -> None:
    """Write plain data that :func:`read_policy_file` reads back.

    Args:
        path: as there.
        note: lines that a YAML file begins with, as comments.

    Raises:
        PolicyError: the file cannot be written, or its suffix is none of ``SUFFIXES``.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        refuse("suffix", path.suffix, listed(SUFFIXES) + did_you_mean(path.suffix, SUFFIXES))
    if suffix == ".json":
        text = json.dumps(content, indent=2) + "\n"
    else:
        yaml = _yaml()
        text = "".join(f"# {line}\n" for line in note.splitlines())
        # A layer is a line.
        flow = None if any(isinstance(value, Mapping) for value in content.values()) else False
        text += yaml.safe_dump(content, sort_keys=False, default_flow_style=flow, width=1000)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PolicyError(f"cannot be written: {error}") from error


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError as error:
        raise PolicyError(
            "YAML needs PyYAML (pip install PyYAML); valid without it: a .json file"
        ) from error


def _parse_json(text: str) -> object:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content:
                raise PolicyError(f"key {key!r} is there twice; valid: each key once")
            content[key] = value
        return content

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise PolicyError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error


def _parse_yaml(text: str) -> object:
    yaml = _yaml()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise PolicyError(f"{where}{error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise PolicyError(f"cannot be parsed: {error}") from error
    _refuse_repeated_keys(root, yaml.MappingNode, yaml.ScalarNode)
    return content


def _refuse_repeated_keys(root: Any, mapping_node: Any, scalar_node: Any) -> None:
    pending: list[Any] = [root]
    visited: set[int] = set()
    while pending:
        node = pending.pop()
        if not isinstance(node, mapping_node) or id(node) in visited:
            continue
        visited.add(id(node))
        seen: set[str] = set()
        for key, value in node.value:
            pending.append(value)
            if not isinstance(key, scalar_node):
                continue
            if key.value in seen:
                line = key.start_mark.line + 1
                raise PolicyError(
                    f"line {line}: key {key.value!r} is there twice; valid: each key once"
                )
            seen.add(key.value)
