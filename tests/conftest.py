"""What every test runs under: no stale compile caches, no network, known threads and seed."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator

import pytest

# Before torch is imported, here and in the processes that tests start. Workers of pytest-xdist
# inherit the folder of the process that started them, so that one session compiles a thing once.
_OWNS_CACHE = "HSA_TEST_CACHE" not in os.environ
if _OWNS_CACHE:
    os.environ["HSA_TEST_CACHE"] = tempfile.mkdtemp(prefix="hsa-test-")
_CACHE = os.environ["HSA_TEST_CACHE"]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_CACHE, "inductor")
os.environ["TRITON_CACHE_DIR"] = os.path.join(_CACHE, "triton")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Test processes share the cores already; a pool of compilers in each would only add start-up time.
_PARALLEL = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if _PARALLEL:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

SEED = int(os.environ.get("HSA_TEST_SEED", "0"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")
    parser.addoption(
        "--write-models",
        action="store_true",
        help="with --run-slow: write docs/models.md from what tests/models/test_families.py finds",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist send their results to the process that started them.
    if config.getoption("--write-models") and not hasattr(config, "workerinput"):
        if not config.getoption("--run-slow"):
            raise pytest.UsageError(
                "--write-models needs --run-slow: a row is made of all its cases"
            )
        from tests.models.table import Table

        config.pluginmanager.register(Table())


def pytest_report_header() -> list[str]:
    import torch

    return [
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, "
        f"cuda {'available' if torch.cuda.is_available() else 'not available'}",
        f"seed {SEED} (HSA_TEST_SEED)",
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_unconfigure() -> None:
    if _OWNS_CACHE:
        shutil.rmtree(_CACHE, ignore_errors=True)
        os.environ.pop("HSA_TEST_CACHE", None)


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """What is there when a module begins is not searched for garbage again.

    A process holds millions of objects before long, most of them of libraries, and the collections that tests ask for
    took seconds each.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_torch() -> Iterator[None]:
    """Seed every test alike, and let no compiled code or recompile count reach the next one."""
    random.seed(SEED)
    # Its empty records, made for another reader, would fill pages of every failure's report.
    logging.getLogger("torch.__trace").propagate = False
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(SEED)
    yield
    if "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset()
