"""A cache that its library moves between host and device by itself breaks a compiled model, or is moved twice.

transformers PR#35164, PR#37974. Right: eager's tokens; nothing of such a cache is moved to the host tier. The library
moves them on a stream of its own, and torch 2.11 crashes in code that it compiles for that, with any backend: there a
process of its own shows that this one is no worse.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import sys
import torch
from hsa_compile.runtime.host_memory import host_bytes
from tests.models.helpers import compile_hsa, request, tiny

backend, kind = sys.argv[1:]
asked = request(2, 40)
given = {"input_ids": asked.ids.cuda(), "attention_mask": asked.mask[:, :40].cuda()}
how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": kind}
model = tiny("llama").cuda()
model.generation_config.eos_token_id = None
expected = model.generate(**given, **how)
policy = {"budget": 64, "page_size": 16, "placement": "host"}
if backend == "hsa":
    model.forward = compile_hsa(model.forward, policy)
else:
    model.forward = torch.compile(model.forward, backend=backend)
got = model.generate(**given, **how)
assert host_bytes().in_use == 0, "moved twice"
assert torch.equal(got, expected)
"""


def run(backend: str, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _PROGRAM, backend, kind]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: nothing is offloaded without"
)
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_generate(kind: str) -> None:
    got = run("hsa", kind)
    if got.returncode < 0 and run("eager", kind).returncode < 0:
        pytest.skip("torch crashes on this cache without any backend of ours")
    assert got.returncode == 0, got.stderr[-3000:]
