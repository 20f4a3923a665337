"""A backend that is registered as an entry point is hidden until something looks it up, and a typo helps nobody.

pytorch#131360, PR#189333. Right: the name alone works in a fresh process, and so does importing the package first.
"""

import os
import subprocess
import sys

import pytest

MODEL = """
import torch
x = torch.randn(2, 3)
compiled = torch.compile(torch.sin, backend="hsa", options={"run": "eager"})
torch.testing.assert_close(compiled(x), x.sin())
assert "hsa" in torch._dynamo.list_backends()
"""
TYPO = """
try:
    torch.compile(torch.sin, backend="hsaa")(x)
except Exception as error:
    assert "hsaa" in str(error) and "list_backends" in str(error), error
else:
    raise AssertionError("an unknown backend was taken")
"""


@pytest.mark.parametrize("first", ["", "import hsa_compile"])
def test_fresh_process(first: str) -> None:
    code = f"{first}\n{MODEL}\n{TYPO}\nprint('works')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0 and "works" in done.stdout, done.stderr[-2000:]
