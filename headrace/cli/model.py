"""The commands that use or convert a model: eval, generate, serve, export, import and quantize.

Recipes and options are checked before JAX is imported, so that a mistake is reported at once."""

import argparse
import functools
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from headrace import api
from headrace.config.recipe import load_run
from headrace.convert.export import check_export
from headrace.errors import UserError
from headrace.quantize.options import choose_method


def evaluate(args: argparse.Namespace) -> None:
    """Print the metrics of the evaluation data, or with --tasks the table of lm-evaluation-harness."""
    for option, value in (("--limit", args.limit), ("--batch", args.batch)):
        if value is not None and not args.tasks:
            raise UserError(f"{option}: found {value}, expected --tasks as well, or it has no effect")
        if value is not None and value < 1:
            raise UserError(f"{option}: found {value}, expected 1 or more")
    run = api.open_run(args.run, args.overrides, ema=args.ema)
    if args.tasks:
        from headrace.inference import lm_eval

        tasks = args.tasks.split(",")
        results = lm_eval.evaluate_tasks(run, tasks, max_examples=args.limit, batch_size=args.batch or 8)
        print(lm_eval.format_results(results))
        return
    from headrace.training import evaluate

    step = f"step {run.step}: " if run.step else ""
    print(step + evaluate.format_result(api.evaluate(run), run.recipe.objective))


def generate(args: argparse.Namespace) -> None:
    """Print a prompt and the text that continues it, as it is generated."""
    overrides = [] if args.recurrence is None else [f"recurrence.rounds={args.recurrence}"]
    if args.recurrence is not None:
        check_recurrence(args.run, args.recurrence)
    run = api.open_run(args.run, overrides, ema=args.ema)
    pieces = api.generate(
        run,
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        pause_tokens=args.pause_tokens,
        steps=args.steps,
        block=args.block,
        order=args.order,
        exit_share=args.exit_share,
    )
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def check_recurrence(run_dir: str, rounds: int) -> None:
    """Raise UserError for --recurrence if it is below 1, or the run has no recurrent depth."""
    if load_run(run_dir).recurrence is None:
        raise UserError("--recurrence: expected nothing: the run has no recurrent depth")
    if rounds < 1:
        raise UserError(f"--recurrence: found {rounds}, expected 1 or more")


def serve(args: argparse.Namespace) -> None:
    """Serve a model until Ctrl-C."""
    run = api.open_run(args.run, ema=args.ema)
    from headrace.inference.serve import http

    report = functools.partial(print, flush=True)
    http.serve(run, host=args.host, port=args.port, slots=args.slots, length=args.length, report=report)


def export(args: argparse.Namespace) -> None:
    """Export a model, and print the files that were written."""
    check_export(args.target, args.dtype, packed=args.packed, adapter=args.adapter)
    run = api.open_run(args.run, ema=args.ema)
    print_files(api.export(run, args.target, dtype=args.dtype, packed=args.packed, adapter=args.adapter))


def import_model(args: argparse.Namespace) -> None:
    """Import a model, and print what can be done with it."""
    recipe = api.import_model(args.folder, args.run)
    from headrace.checkpoint import open_hf

    if note := open_hf.ignored_note(recipe.model, open_hf.weight_paths(recipe.model), Path(args.folder)):
        print(note)
    print(f"{args.run}: imported as {recipe.model.use}; next:")
    if recipe.model.causal:
        print(f"  headrace generate {args.run} --prompt TEXT")
    print(f"  headrace train {args.run}/recipe.yaml data.path=DATA")


def quantize(args: argparse.Namespace) -> None:
    """Quantize a model, and print the files that were written."""
    choose_method(load_run(args.run), args.method, args.bits, args.overrides)
    skip_triton_matmuls()
    run = api.open_run(args.run, ema=args.ema)
    print_files(
        api.quantize(
            run,
            args.to,
            method=args.method,
            bits=args.bits,
            settings=args.overrides,
            data=args.data,
            samples=args.samples,
            dtype=args.dtype,
            report=print,
        )
    )


def skip_triton_matmuls() -> None:
    """Keep XLA from trying Triton's matmuls on a GPU. To be called before JAX is imported.

    Quantization compiles many programs that run seldom, and the search for the fastest matmul would take
    longer than it saves: on an H200, compiling for 8 small layers took 70 to 90 s with it; without it,
    quantizing them took 53 to 65 s in total."""
    has_gpu = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    flags = os.environ.get("XLA_FLAGS", "")
    if has_gpu and "xla_gpu_enable_triton_gemm" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false"


def print_files(paths: Iterable[Path]) -> None:
    """Print files with their sizes."""
    for path in paths:
        print(f"{path}  {path.stat().st_size:,} bytes")
