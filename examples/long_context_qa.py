"""Answer a question from a long text twice: with dense attention and with `backend="hsa"`.

A fact is hidden in a long real text and asked for. The model is unmodified `transformers` code;
the prompt is prefilled once, uncompiled, and each answer is then decoded token by token from a
copy of the same cache. What is printed side by side: both answers, what was matched and under which
policy, the KV tokens read, the time of a token, and how well the logits agree.

    python examples/long_context_qa.py
    python examples/long_context_qa.py --budget 512 --depth 0.2
    python examples/long_context_qa.py --model path/to/model --text book.txt --question "Who ...?"
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import decoding
import needle
import report
import torch
import weights
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

import hsa_compile
from hsa_compile.errors import HsaError
from hsa_compile.policy import Policy

DEFAULT_POLICY: dict[str, Any] = {"budget": 1024, "page_size": 16}
WARM_UP = 4  # steps that may still compile, or record a CUDA graph
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DemoError(Exception):
    """Something that the user can put right; the message says how."""


@dataclass(frozen=True)
class Answer:
    """One of the two runs, ready to be shown.

    Attributes:
        text: the answer, up to the end-of-text token.
        steps: tokens fed for it.
        correct: whether the fact is in it; None where nothing is expected.
        ms_per_token: median after the warm-up.
        first_step_s: the first step, which compiles.
    """

    text: str
    steps: int
    correct: bool | None
    ms_per_token: float
    first_step_s: float


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=weights.DEFAULT, help="folder, .gguf file or hub id (%(default)s)")
    add("--text", metavar="FILE", help="the long text (Python's reference documentation)")
    add("--question", help="what is asked; alone, it is asked about the text and no fact is hidden")
    add("--fact", help=f"the sentence that is hidden ({needle.FACT!r})")
    add("--expect", metavar="WORDS", help="what a right answer holds (the last number in the fact)")
    add("--depth", type=float, default=0.5, help="where the fact goes, 0 to 1 (%(default)s)")
    add("--tokens", type=int, help=f"length of the prompt ({needle.DEFAULT_TOKENS}, or the --text)")
    add("--new-tokens", type=int, default=32, help="tokens to decode (%(default)s)")
    add("--policy", metavar="FILE", help=f"a JSON or YAML policy file ({DEFAULT_POLICY})")
    add("--budget", type=int, help="tokens that a decoded token reads per layer, in place of it")
    add("--cache", choices=["static", "dynamic"], default="static", help="(%(default)s)")
    add("--device", choices=["cpu", "cuda"], help="(cuda where there is one)")
    add("--dtype", choices=list(FORMATS), help="(float32 on a CPU, bfloat16 on a GPU)")
    add("--mode", help="mode of torch.compile for both runs (reduce-overhead on a GPU)")
    add("--dense", choices=["inductor", "eager"], default="inductor", help="(%(default)s)")
    add("--run", choices=["inductor", "eager"], default="inductor", help="the same for the hsa run")
    add("--chunk", type=int, default=512, help="tokens prefilled at a time (%(default)s)")
    add("--json", metavar="OUT", help="write all results to this file")
    return parser.parse_args(argv)


def load(args: argparse.Namespace, console: Console) -> tuple[Any, Any, str]:
    """Tokenizer, model and the model's name."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = weights.find(args.model, say=lambda line: console.print(line, style="dim"))
    how = source.arguments()
    try:
        # The loaders' own progress bars go; what goes wrong arrives as an exception.
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, **how)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                source.folder, dtype=FORMATS[args.dtype], **how
            )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise DemoError(f"cannot load {args.model}: {error}") from error
    if not tokenizer.is_fast:
        raise DemoError(f"{args.model} has no fast tokenizer, which this example needs")
    return tokenizer, model.to(args.device, FORMATS[args.dtype]).eval(), source.name


def make_prompt(args: argparse.Namespace, tokenizer: Any, model: Any) -> needle.Prompt:
    """The prompt that the arguments ask for."""
    if args.new_tokens < 2:
        raise DemoError(f"--new-tokens {args.new_tokens} must be at least 2")
    fact = args.fact or (None if args.question else needle.FACT)
    if args.fact and not args.question:
        raise DemoError("--fact needs a --question that asks for it")
    text = needle.read_text(args.text) if args.text else needle.python_documentation()
    tokens = args.tokens
    if tokens is None and not args.text:
        tokens = needle.DEFAULT_TOKENS
    config = model.config.get_text_config()
    return needle.build(
        tokenizer,
        text,
        args.question or needle.QUESTION,
        fact=fact,
        depth=args.depth,
        tokens=tokens,
        most=getattr(config, "max_position_embeddings", 1 << 20) - args.new_tokens,
        expected=args.expect,
    )


def compiled_models(args: argparse.Namespace, model: Any, policy: Any) -> tuple[Any, Any]:
    """The dense model and the sparse one; nothing is compiled before it is called."""
    options: dict[str, Any] = {"policy": policy}
    if args.run == "eager":
        options["run"] = "eager"
    elif args.mode:
        options["mode"] = args.mode  # torch.compile takes no mode= beside options=
    dense = model if args.dense == "eager" else torch.compile(model, mode=args.mode)
    return dense, torch.compile(model, backend="hsa", options=options)


def end_tokens(tokenizer: Any, model: Any) -> set[int]:
    """Tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [ids]
    return {i for i in [*ids, tokenizer.eos_token_id] if i is not None}


def as_answer(run: decoding.Run, tokenizer: Any, ends: set[int], expected: str | None) -> Answer:
    """Cut `run` at its first end token and time its steps."""
    length = next((i for i, t in enumerate(run.tokens) if t in ends), len(run.tokens) - 1)
    text = tokenizer.decode(run.tokens[:length], skip_special_tokens=True).strip()
    steady = run.seconds[min(WARM_UP, len(run.seconds) - 1) :]
    return Answer(
        text=text,
        steps=max(1, length),
        correct=None if expected is None else expected.lower() in text.lower(),
        ms_per_token=1e3 * statistics.median(steady),
        first_step_s=run.seconds[0],
    )


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 100)
    try:
        demo(args, console)
    except (DemoError, needle.PromptError, weights.WeightsError, HsaError) as error:
        problem: Exception = error
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, HsaError):
            raise
        problem = error.inner_exception
    else:
        return 0
    print(f"error: {problem}", file=sys.stderr)
    return 2


def settle(args: argparse.Namespace) -> Any:
    """Fill in the choices that depend on the machine, and return the policy."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda, but torch finds no GPU here; use --device cpu")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.mode is None and args.device == "cuda" and args.cache == "static":
        args.mode = "reduce-overhead"

    if args.policy and args.budget is not None:
        raise DemoError("--policy and --budget exclude each other: put the budget into the file")
    policy: Any = args.policy or dict(DEFAULT_POLICY)
    if args.budget is not None:
        policy["budget"] = args.budget
    Policy.load(policy)  # a mistake is told before the model is loaded
    return policy


def demo(args: argparse.Namespace, console: Console) -> None:
    """Run both answers and print them."""
    policy = settle(args)
    with console.status(f"loading {args.model}"):
        tokenizer, model, name = load(args, console)
        prompt = make_prompt(args, tokenizer, model)
    dense_model, sparse_model = compiled_models(args, model, policy)
    report.print_setting(console, name, args, prompt, policy)

    steps, expected = args.new_tokens, prompt.expected
    cache_name = decoding.cache_argument(model)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<34}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:

        def bar(title: str, total: int) -> Any:
            task = progress.add_task(title, total=total)
            return lambda n: progress.update(task, advance=n)

        ids = torch.tensor([prompt.ids], device=args.device)
        cache = decoding.new_cache(model, args.cache, len(prompt.ids) + steps)
        advance = bar("prefill (uncompiled)", len(prompt.ids))
        first = decoding.prefill(model, ids, cache, args.chunk, advance)

        def answer(model: Any, title: str, forced: list[int] | None = None) -> decoding.Run:
            copied = decoding.copy_of(cache)
            advance = bar(title, steps)
            return decoding.decode(model, cache_name, copied, first, steps, advance, forced)

        dense_run = answer(dense_model, "dense: compile, then decode")
        sparse_run = answer(sparse_model, "hsa: compile, then decode")
        sites = hsa_compile.explain(sparse_model).sites
        layers = hsa_compile.stats(sparse_model).layers
        forced_run = sparse_run
        if sparse_run.tokens != dense_run.tokens:
            forced_run = answer(sparse_model, "hsa on the dense answer", dense_run.tokens)

    ends = end_tokens(tokenizer, model)
    answers = {
        "dense": as_answer(dense_run, tokenizer, ends, expected),
        "hsa": as_answer(sparse_run, tokenizer, ends, expected),
    }
    compared = answers["dense"].steps
    agreed = decoding.agreement(dense_run.logits[:compared], forced_run.logits[:compared])
    report.print_matches(console, sites)
    report.print_answers(console, answers, layers, expected)
    report.print_agreement(console, agreed)
    if args.json:
        results = {
            "model": name,
            "torch": torch.__version__,
            "arguments": vars(args),
            "prompt_tokens": len(prompt.ids),
            "fact_at": prompt.fact_at,
            "expected": expected,
            "answers": {key: asdict(value) for key, value in answers.items()},
            "layers": [report.layer_numbers(layer) for layer in layers],
            "agreement": asdict(agreed),
        }
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
