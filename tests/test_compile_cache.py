"""A warm compile cache never answers for edited code or another policy."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import json, sys, torch
from torch._dynamo.utils import counters
from hsa_compile.backend import hsa_backend
import hsa_compile
torch.manual_seed(0)

def decode(q, keys, values, k, v, position):
    keys.index_copy_(2, position, k)
    values.index_copy_(2, position, v)
    mask = (torch.arange(keys.shape[2]) <= position[:, None])[None, None]
    return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

policy = json.loads(sys.argv[1])
keys, values = torch.randn(2, 1, 2, 128, 16)
q, k, v = torch.randn(3, 1, 2, 1, 16)
step = torch.compile(decode, backend=hsa_backend, options={"policy": policy})
with torch.no_grad():
    out = step(q, keys, values, k, v, torch.tensor([100]))
explanation = hsa_compile.explain(decode, q, keys, values, k, v, torch.tensor([100]), options={"policy": policy})
print(json.dumps({
    "out": out.flatten().tolist(),
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "explain": str(explanation),
}))
"""


class Warm:
    """A private copy of the package and a compile cache that lives across processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for source, target in (
            ("hsa_compile", "."),
            ("passes", "passes"),
            ("templates", "templates"),
        ):
            shutil.copytree(
                ROOT / source,
                folder / "src" / "hsa_compile" / target,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )

    def run(self, **policy: object) -> dict:
        env = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        }
        policy = {"budget": 32, "page_size": 16, "recent": 16, **policy}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(policy)],
            env=env,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def edit(self, path: str, old: str, new: str) -> None:
        file = self.folder / "src" / "hsa_compile" / path
        text = file.read_text()
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
        file.write_text(text.replace(old, new))


def test_a_warm_cache_never_answers_for_edited_code_or_another_policy(tmp_path: Path) -> None:
    warm = Warm(tmp_path)
    cold = warm.run()
    again = warm.run()
    assert again["hits"] == 1 and again["misses"] == 0, "not warm: the test would prove nothing"
    assert again["out"] == cold["out"]
    assert again["explain"] == cold["explain"], "explain must not depend on the cache"

    other = warm.run(budget=96)
    assert other["hits"] == 0
    assert other["out"] != cold["out"]

    warm.edit("ops/aten.py", "    return out.", "    out = out * 2\n    return out.")
    edited = warm.run()
    assert edited["hits"] == 0
    assert edited["out"] == pytest.approx([2 * x for x in cold["out"]], rel=1e-5)

    template = next((tmp_path / "src/hsa_compile/templates").glob("*.jinja"))
    template.write_text(template.read_text() + "\n{# edited #}\n")
    assert warm.run()["hits"] == 0
