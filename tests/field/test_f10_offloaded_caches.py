"""A cache that its library moves between host and device by itself breaks a compiled model, or is moved twice.

transformers PR#35164, PR#37974. Right: eager's tokens; nothing of such a cache is moved to the host tier.
"""

import gc

import pytest
import torch

from hsa_compile.runtime.host_memory import host_bytes

from ..models.helpers import compile_hsa, request, tiny


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: nothing is offloaded without"
)
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
def test_generate(kind: str) -> None:
    asked = request(2, 40)
    given = {"input_ids": asked.ids.cuda(), "attention_mask": asked.mask[:, :40].cuda()}
    how = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": kind}
    model = tiny("llama").cuda()
    model.generation_config.eos_token_id = None
    expected = model.generate(**given, **how)
    gc.collect()
    before = host_bytes().in_use
    model.forward = compile_hsa(model.forward, {"budget": 64, "page_size": 16, "placement": "host"})
    got = model.generate(**given, **how)
    assert host_bytes().in_use == before, "offloaded twice"
    assert torch.equal(got, expected)
