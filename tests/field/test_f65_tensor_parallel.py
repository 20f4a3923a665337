"""A static cache is made for all heads, though each rank of a tensor-parallel model has some of them.

transformers PR#39164. Right: shapes are read from the tensors of the graph, so every rank selects for its own KV heads.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..models.helpers import tiny

RANKS = 2


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.tensor")
    tiny("llama").save_pretrained(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(RANKS):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(tmp_path)],
                env={**os.environ, **ranks, **address},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for child in children:
        said, _ = child.communicate(timeout=300)
        assert child.returncode == 0, said
        assert "one KV head, rewritten, as eager" in said


def main(folder: str) -> None:
    """One rank: eager decoding against compiled decoding, within the budget."""
    import transformers

    import hsa_compile

    torch.distributed.init_process_group("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    prompt = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(0))

    def decode(step: object) -> torch.Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=96)
        outs = []
        with torch.no_grad():
            out = model(prompt, past_key_values=cache).logits[:, -1:]
            for _ in range(4):
                out = step(out.argmax(-1), past_key_values=cache).logits  # type: ignore[operator]
                outs.append(out)
        assert cache.layers[0].keys.shape == (1, 1, 96, 16)
        return torch.cat(outs, 1)

    options = {"policy": {"budget": 64, "page_size": 16}, "run": "eager", "strict": True}
    compiled = torch.compile(model, backend="hsa", options=options)
    want = decode(model)
    torch.testing.assert_close(decode(compiled), want, rtol=0, atol=1e-5)
    assert hsa_compile.stats(compiled).steps == 4
    print("one KV head, rewritten, as eager")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
