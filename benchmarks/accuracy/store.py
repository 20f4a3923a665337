"""The file of results: one record a sample and policy, written so that a run can be interrupted at any time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.accuracy.errors import AccuracyError
from hsa_compile import Policy

Key = tuple[str, str, int, int, str]
Record = dict[str, Any]
MADE = ("date", "machine", "versions")


def key_of(record: Mapping[str, Any]) -> Key:
    """Model, task, context (tokens), sample, policy (its label)."""
    return tuple(record[name] for name in ("model", "task", "context", "sample", "policy"))  # type: ignore[return-value]


@dataclass
class Store:
    """Results by key, and what they depend on.

    Attributes:
        path: of the JSON file.
        settings: what all records must share to be compared; see :meth:`agree`.
        policies: by label, as ``Policy.to_dict`` gives them.
        records: by key.
        made: date, machine and versions of the run that wrote the file.
    """

    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, Any] = field(default_factory=dict)
    records: dict[Key, Record] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Store:
        """What the file holds; empty where there is none.

        Raises:
            AccuracyError: it is not a file of results.
        """
        store = cls(path)
        if not path.exists():
            return store
        try:
            content = json.loads(path.read_text())
            store.settings, store.policies = content["settings"], content["policies"]
            store.made = {name: content[name] for name in MADE if name in content}
            store.records = {key_of(record): record for record in content["results"]}
        except (ValueError, KeyError, TypeError) as error:
            raise AccuracyError(
                f"{path} is not a file of results: {error!r}; valid: another --json"
            ) from error
        return store

    def agree(self, settings: Mapping[str, Any], policies: Mapping[str, Policy]) -> None:
        """Take over what this run is made with.

        Raises:
            AccuracyError: the file was made with other settings, or with other policies of the same names.
        """
        given = json.loads(json.dumps(dict(settings)))
        for name, value in given.items():
            if self.records and self.settings.get(name) != value:
                raise AccuracyError(
                    f"{self.path} was made with {name} {self.settings.get(name)!r}, and this run has {value!r}; "
                    "valid: the same, or another --json"
                )
        self.settings = given
        for label, policy in policies.items():
            content = policy.to_dict()
            content["layers"] = {str(key): layer for key, layer in content["layers"].items()}
            # Compared as policies: the file may be older than some of their fields.
            known = self.policies.get(label)
            if known is not None and Policy.load(known) != policy:
                raise AccuracyError(
                    f"{self.path} has another policy called {label!r}; valid: another --json, or rename the file"
                )
            self.policies[label] = content

    def take(self, other: Store) -> None:
        """Take over the results of another file, of a run beside this one.

        Raises:
            AccuracyError: it was made with other settings, or with other policies of the same names.
        """
        known = {label: Policy.load(content) for label, content in other.policies.items()}
        if not self.records:
            self.made = other.made
        self.agree(other.settings, known)
        self.records.update(other.records)

    def missing(self, keys: list[Key]) -> list[Key]:
        """Those that have no record yet."""
        return [key for key in keys if key not in self.records]

    def add(self, record: Record) -> None:
        self.records[key_of(record)] = record

    def write(self, made_here: bool = True) -> None:
        """Replace the file at once, so that there is always a whole one; a record is a line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if made_here:
            here = (time.strftime("%Y-%m-%d"), common.machine(), common.versions("transformers"))
            self.made = dict(zip(MADE, here))
        head = {"benchmark": "accuracy", **self.made, "settings": self.settings}
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in head.items()]
        policies = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in self.policies.items()]
        results = [
            f"    {json.dumps(record, separators=(',', ':'))}"
            for _, record in sorted(self.records.items())
        ]
        lines.append('  "policies": {\n' + ",\n".join(policies) + "\n  }")
        lines.append('  "results": [\n' + ",\n".join(results) + "\n  ]")
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(partial, self.path)
