"""What sparse decoding loses on pretrained weights: needles, perplexity, and the softmax mass that pages capture.

A context is prefilled once, dense and uncompiled. What follows it, the question and the answer or a continuation,
is then decoded token by token from the same KV cache: by the model as it is ("dense"), and by
torch.compile(model, backend="hsa") with each policy.

    python -m benchmarks.accuracy --small
    python -m benchmarks.accuracy --model path/to/model --contexts 4096 16384 --budgets 512 2048 --page-sizes 32
    python -m benchmarks.accuracy --policy policy.yaml --algorithms cuboid streaming --json results.json
    python -m benchmarks.accuracy --table --json results.json

Results go to the JSON file after every batch. A run that was interrupted, or that asks for more tasks, lengths or
policies, computes only what is not in the file yet. The tables at the end show scores as a share of dense ones, the
worst task, and the worst layer and head; "cuboid 1024/32" is page score, budget / page size.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import common
from benchmarks.accuracy import haystack, policies, report, tasks
from benchmarks.accuracy.errors import AccuracyError
from benchmarks.accuracy.run import Plan, Runner
from benchmarks.accuracy.store import Store
from hsa_compile import Policy
from hsa_compile.errors import HsaError

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Options of torch.compile. A step of a small model is mostly the host's time to launch it, but in a CUDA graph.
COMPILED: dict[str, dict[str, str]] = {
    "inductor": {},
    "eager": {"run": "eager"},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
RUNS = tuple(COMPILED)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# What is not given is taken from here.
USUAL: dict[str, Any] = {
    "contexts": [4096, 8192, 16384],
    "budgets": [256, 512, 1024, 2048, 4096],
    "page_sizes": [16, 32, 64],
    "samples": 5,
    "continuation": 128,
    "positions": 16,
}
SMALL: dict[str, Any] = {
    "contexts": [1024],
    "budgets": [256],
    "page_sizes": [16],
    "samples": 2,
    "continuation": 32,
    "positions": 8,
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured").add_argument
    what("--model", default="smollm2", help="folder, .gguf file or hub id (%(default)s)")
    what("--tasks", nargs="+", metavar="TASK", help=f"out of {' '.join(tasks.TASKS)} (all)")
    what("--contexts", nargs="+", metavar="N", help=f"tokens ({_said('contexts')})")
    what("--samples", metavar="N", help=f"of each task and length ({USUAL['samples']})")
    what(
        "--text",
        nargs="+",
        metavar="TEXT",
        default=list(haystack.NAMED),
        help="documentation, code (both Python's own) or files; samples take turns (both)",
    )
    what("--continuation", metavar="N", help=f"tokens predicted ({USUAL['continuation']})")
    what("--positions", metavar="N", help="steps at which mass is recorded, 0 for none (16)")
    what(
        "--question",
        default="sparse",
        metavar="HOW",
        help="sparse: decoded token by token; dense: prefilled with the context (%(default)s)",
    )
    what("--seed", type=int, default=0, help="of names, numbers and places (%(default)s)")
    what("--small", action="store_true", help="defaults that take a CPU a few minutes")

    which = parser.add_argument_group("policies: all combinations, and those given").add_argument
    which(
        "--algorithms",
        nargs="*",
        metavar="SCORE",
        help=f"out of {' '.join(policies.scores())} ({' '.join(policies.usual_scores())})",
    )
    which("--budgets", nargs="+", metavar="N", help=f"tokens, or a fraction ({_said('budgets')})")
    which("--page-sizes", nargs="+", metavar="N", help=f"tokens ({_said('page_sizes')})")
    which(
        "--policy",
        nargs="+",
        action="extend",
        default=[],
        metavar="POLICY",
        help="presets or JSON or YAML files; may be repeated; alone, they take the place of the combinations",
    )
    which(
        "--presets",
        action="store_true",
        help=f"the same as --policy {' '.join(policies.purposes())}",
    )

    how = parser.add_argument_group("how").add_argument
    how("--device", metavar="DEVICE", help="cpu or cuda (cuda where there is one)")
    how("--dtype", metavar="DTYPE", help="(float32 on a CPU, bfloat16 on a GPU)")
    how("--run", metavar="HOW", help=f"{', '.join(RUNS)} (eager on a CPU, the last on a GPU)")
    how("--batch", metavar="N", help="samples decoded together (4 on a CPU, 16 on a GPU)")
    how("--chunk", metavar="N", help="tokens prefilled at a time (512 on a CPU, 1024 on a GPU)")
    how("--json", type=Path, metavar="OUT", help="(benchmarks/results/accuracy.json)")
    how("--table", action="store_true", help="print the tables of the file and run nothing")
    how(
        "--merge",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="add the results of other files, of runs side by side, and run nothing",
    )
    how("--markdown", action="store_true", help="the same as one table for the documentation")
    return parser.parse_args(argv)


def _said(name: str) -> str:
    return " ".join(map(str, USUAL[name]))


def number(option: str, value: object, least: int = 1) -> int:
    """An option's integer.

    Raises:
        AccuracyError: it is none, or less than ``least``.
    """
    try:
        found = int(str(value))
    except ValueError:
        found = least - 1
    if found < least:
        raise AccuracyError(f"{option} {value!r} is not valid; valid: an int >= {least}")
    return found


def budget(value: object) -> int | float:
    """An option's budget: tokens, or a fraction where it is written with a dot. The policy checks its range."""
    try:
        return float(str(value)) if "." in str(value) else int(str(value))
    except ValueError:
        raise AccuracyError(
            f"--budgets {value!r} is not valid; valid: an int (tokens) or a number in (0, 1] with a dot (a fraction)"
        ) from None


def settle(args: argparse.Namespace) -> None:
    """Fill in what was not given, and check what can be checked before a model is loaded.

    Raises:
        AccuracyError, PolicyError: an option is not valid.
    """
    if args.presets:
        args.policy = [*policies.purposes(), *args.policy]
    args.chosen_contexts = args.contexts is not None
    combined = (args.algorithms, args.budgets, args.page_sizes)
    args.combine = not args.policy or any(given is not None for given in combined)
    for name, value in (USUAL | (SMALL if args.small else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.tasks = list(dict.fromkeys(args.tasks or tasks.TASKS))
    policies.check_each("--tasks", args.tasks, tasks.TASKS)
    policies.check_each("--question", [args.question], tasks.QUESTIONS)
    args.contexts = sorted({number("--contexts", one) for one in args.contexts})
    for name in ("samples", "continuation"):
        setattr(args, name, number(f"--{name}", getattr(args, name)))
    args.positions = number("--positions", args.positions, least=0)

    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    policies.check_each("--device", [args.device.split(":")[0]], ("cpu", "cuda"))
    gpu = args.device != "cpu"
    if gpu and not torch.cuda.is_available():
        raise AccuracyError(f"--device {args.device!r}: torch finds no GPU here; valid: 'cpu'")
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    policies.check_each("--dtype", [args.dtype], tuple(FORMATS))
    args.run = args.run or ("reduce-overhead" if gpu else "eager")
    policies.check_each("--run", [args.run], RUNS)
    args.batch = number("--batch", args.batch or (16 if gpu else 4))
    args.chunk = number("--chunk", args.chunk or (1024 if gpu else 512))
    args.policies = chosen_policies(args)


def chosen_policies(args: argparse.Namespace) -> dict[str, Policy]:
    """The policies that the options name, by label, with their KV caches on the device."""
    named = policies.explicit(args.policy)
    grid: dict[str, Policy] = {}
    if args.combine:
        chosen = args.algorithms if args.algorithms is not None else policies.usual_scores()
        policies.check_each("--algorithms", chosen, policies.scores())
        sizes = [number("--page-sizes", one) for one in args.page_sizes]
        grid = policies.grid(chosen, [budget(one) for one in args.budgets], sizes)
    found = policies.together(grid, named)
    if not found:
        raise AccuracyError(
            "there is no policy to measure; valid: --algorithms, --policy, or neither"
        )
    args.moved = [label for label, policy in found.items() if policy != policies.on_device(policy)]
    return {label: policies.on_device(policy) for label, policy in found.items()}


def weights() -> ModuleType:
    """``examples/weights.py``, which knows where models are."""
    name = "hsa_example_weights"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / "weights.py")
        assert spec and spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def load(args: argparse.Namespace, console: Console) -> tuple[Any, Any, str]:
    """Tokenizer, model and the model's name.

    Raises:
        AccuracyError: there is no such model, or it cannot be used.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    finder = weights()
    try:
        source = finder.find(args.model, say=console.print)
        how = source.arguments()
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **how)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source.folder, dtype=FORMATS[args.dtype], **how
            )
    except (finder.WeightsError, OSError, ValueError, ImportError, KeyError) as error:
        raise AccuracyError(f"--model {args.model!r} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise AccuracyError(f"--model {args.model!r} has no fast tokenizer, which samples need")
    return tokenizer, model.to(args.device, FORMATS[args.dtype]).eval(), source.name


def fitting_contexts(args: argparse.Namespace, model: Any, console: Console) -> list[int]:
    """The lengths that the model has room for, with what is decoded after them.

    Raises:
        AccuracyError: one that was asked for has none.
    """
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # Contexts as long as the model's are usual; a question runs a little over.
    fitting = [one for one in args.contexts if room is None or one <= room]
    if fitting != args.contexts:
        left = [one for one in args.contexts if one not in fitting]
        if args.chosen_contexts or not fitting:
            raise AccuracyError(
                f"--contexts {left[0]} is not valid; valid: at most {room} for this model"
            )
        console.print(f"contexts {left} are longer than this model's {room}: left out")
    return fitting


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        yield progress


def measure(args: argparse.Namespace, store: Store, console: Console) -> None:
    """Load the model and compute what the store lacks."""
    texts = [(name, haystack.text_of(name)) for name in dict.fromkeys(args.text)]
    with console.status(f"loading {args.model}"):
        tokenizer, model, name = load(args, console)
        stacks = [haystack.tokenize(title, text, tokenizer) for title, text in texts]
    contexts = fitting_contexts(args, model, console)
    if args.moved:
        console.print(
            f"{', '.join(args.moved)}: with placement 'device', whose results are the same"
        )
    settings = {
        "seed": args.seed,
        "samples": args.samples,
        "continuation": args.continuation,
        "question": args.question,
        "positions": args.positions,
        "texts": {stack.name: stack.sha256 for stack in stacks},
        "device": args.device.split(":")[0],
        "dtype": args.dtype,
        "run": args.run,
    }
    store.agree(settings, args.policies)
    setting = tasks.Setting(
        tokenizer, stacks, args.samples, args.seed, args.continuation, args.question
    )
    plan = Plan(
        model,
        name,
        setting,
        args.tasks,
        contexts,
        args.policies,
        args.batch,
        args.chunk,
        args.positions,
        COMPILED[args.run],
        one_cache=args.run != "eager",
    )
    with progress_bar(console) as progress:
        bar = progress.add_task("results", total=plan.total)
        Runner(plan, store, console.print, lambda n: progress.update(bar, advance=n)).run()


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    path = args.json or common.RESULTS / "accuracy.json"
    try:
        store = Store.open(path)
        for other in args.merge:
            if not other.exists():
                raise AccuracyError(f"--merge: no such file: {other}; valid: files that runs wrote")
            store.take(Store.open(other))
        if args.merge:
            store.write(made_here=False)
        if args.table or args.markdown or args.merge:
            if not store.records:
                raise AccuracyError(
                    f"--table: {path} has no results; valid: a file that a run wrote"
                )
        else:
            settle(args)
            measure(args, store, console)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {path}", file=sys.stderr)
        return 130
    except HsaError as error:
        problem: Exception = error
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, HsaError):
            raise
        problem = error.inner_exception
    else:
        if args.markdown:
            print(report.markdown(list(store.records.values())))
            return 0
        for table in report.tables(list(store.records.values())):
            console.print(table)
        console.print(f"results: {path}")
        return 0
    print(f"error: {problem}", file=sys.stderr)
    return 2
