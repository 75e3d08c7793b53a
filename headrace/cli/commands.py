"""The commands: one short function each. JAX is imported only by those that compute."""

import argparse
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.errors import UserError


def train(args: argparse.Namespace) -> int:
    from headrace.config import recipe

    cfg = recipe.load_train(args.recipe, args.overrides)
    if args.program is not None and not args.program.is_dir():
        raise UserError(f"--program: no such folder: {args.program}")
    from headrace.runtime import supervisor

    if args.is_program and not args.once:
        from headrace.checkpoint import inventory

        return supervisor.Supervisor(cfg.run_dir, inventory.newest_sealed_step).watch()
    supervisor.die_with_parent()
    from headrace.runtime import malloc

    malloc.one_arena()  # before JAX is imported, which starts threads and ends some
    from headrace.runtime import multihost
    from headrace.training import run as training_run

    with multihost.exit_codes(owns_process=args.is_program):
        return training_run.run(cfg, args.program, owns_process=args.is_program)


def doctor(args: argparse.Namespace) -> int:
    from headrace.config import recipe

    cfg = recipe.load_train(args.recipe, args.overrides) if args.recipe else None
    from headrace.doctor import report

    return report.run_doctor(cfg, args.recipe, args.overrides)


def plan(args: argparse.Namespace) -> int:
    from headrace.config import recipe

    cfg = recipe.load(args.recipe, args.overrides)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is planned for is elsewhere
    check_plan(args)
    from headrace.cli import plan

    cfg = plan.fill_data_sizes(cfg)
    if args.recommend:
        wish = dict(tokens=args.tokens, days=args.days, budget=args.budget)
        return plan.recommend_slices(cfg, args.slice, **wish, prices=args.prices)
    options = dict(fast=args.fast, out=args.json, prices=args.prices, save=args.save)
    if args.search:
        return plan.search_settings(cfg, args.slice[0], **options, write=args.write)
    return plan.plan_slices(cfg, args.slice, **options, days=args.days)


def check_plan(args: argparse.Namespace) -> None:
    """Options that say nothing together, and numbers that mean nothing."""
    if not args.slice and not args.recommend:
        raise UserError("plan: expected --slice NAME, as in --slice v5p-32, or --recommend")
    if args.search and len(args.slice) != 1:
        raise UserError("plan: --search takes one --slice")
    if args.search and args.recommend:
        raise UserError("plan: --search is for a slice, --recommend for want of one; give one of them")
    idle = {
        "--write": args.write is not None and not args.search,
        "--tokens": args.tokens is not None and (not args.recommend or bool(args.slice)),
        "--budget": args.budget is not None and (not args.recommend or bool(args.slice)),
        "--json": args.json is not None and args.recommend,
        "--save": args.save is not None and (args.fast or args.recommend),
        "--fast": args.fast and args.recommend,
    }
    for option in (option for option, is_idle in idle.items() if is_idle):
        raise UserError(f"plan: {option} has no effect with the other options; leave it out")
    for option, value in (("--days", args.days), ("--budget", args.budget)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"plan: {option}: found {value:g}, expected a number above 0")
    for option, file in (("--json", args.json), ("--write", args.write)):
        if file is not None and file.is_dir():
            raise UserError(f"plan: {option}: found the folder {file}, expected a file")
        if file is not None and not file.absolute().parent.is_dir():
            raise UserError(f"plan: {option}: no such folder: {file.parent}")
    if args.write is not None and args.write.exists():
        raise UserError(f"plan: --write: {args.write} is there already; name a new file")
    if args.tokens is not None and not re.fullmatch(r"0*[1-9]\d*(\.\d+)?[KMBT]?", args.tokens):
        raise UserError(f"plan: --tokens: found {args.tokens}, expected a number, as in 20B")


def data_prepare(args: argparse.Namespace) -> None:
    from headrace.config import recipe

    cfg = recipe.load_data(args.recipe, args.overrides)
    from headrace.data.pipeline.prepare import prepare

    prepare(cfg, print, until=args.until, replace=args.replace)


def data_inspect(args: argparse.Namespace) -> None:
    from headrace.data import inspect as data_inspect

    data_inspect.inspect(args.folder, split=args.split, rows=args.rows, seed=args.seed)


def data_verify(args: argparse.Namespace) -> None:
    from headrace.data.verify import verify

    verify(args.folder, print)


def report(args: argparse.Namespace) -> None:
    if args.samples is not None and args.samples < 1:
        raise UserError(f"--samples: found {args.samples}, expected 1 or more")
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out: found a folder, {args.out}, expected a file")
    from headrace.cli import report

    if args.samples is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leaves the accelerators to those who train
        report.write_samples(args.run, args.samples)
    print(report.write_page(args.run, args.out))


def open_run(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Any:
    """The run folder that a command names; its recipe is checked before JAX is imported."""
    from headrace.config import recipe

    cfg = recipe.load_run(args.run, overrides)
    from headrace.checkpoint import open_run

    return open_run.open_run(cfg, item={True: "ema", False: "params", None: None}[args.ema])


def evaluate(args: argparse.Namespace) -> None:
    for option in ("limit", "batch"):
        value = getattr(args, option)
        if value is not None and (not args.tasks or value < 1):
            wanted = "1 or more" if args.tasks else "--tasks as well, or it has no effect"
            raise UserError(f"--{option}: found {value}, expected {wanted}")
    run = open_run(args, args.overrides)
    if args.tasks:
        from headrace.inference import lm_eval

        print(lm_eval.evaluate(run, args.tasks.split(","), limit=args.limit, batch=args.batch or 8))
        return
    from headrace.training import evaluate

    at = f"step {run.step}: " if run.step else ""
    print(at + evaluate.format_result(evaluate.evaluate_run(run), run.recipe.objective))


def generate(args: argparse.Namespace) -> None:
    rounds = [] if args.recurrence is None else [f"recurrence.rounds={args.recurrence}"]
    if rounds or args.exit is not None:
        check_recurrence_options(args)
    run = open_run(args, rounds)
    from headrace.inference import generate
    from headrace.inference import sampling as inference_sampling

    sampling = inference_sampling.Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    named = {name: getattr(args, name) for name in ("steps", "block", "order")}
    named = {name: value for name, value in named.items() if value is not None}
    pieces = generate.generate(run, args.prompt, args.tokens, sampling, named, args.exit or 0.0, args.pause)
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def check_recurrence_options(args: argparse.Namespace) -> None:
    from headrace.config import recipe

    option = "--exit" if args.recurrence is None else "--recurrence"
    if recipe.load_run(args.run).recurrence is None:
        raise UserError(
            f"{option}: expected nothing, since the run has no recurrent depth (recurrence.rounds)"
        )
    if args.recurrence is not None and args.recurrence < 1:
        raise UserError(f"--recurrence: found {args.recurrence}, expected 1 or more")
    if args.exit is not None and not 0 <= args.exit < math.inf:
        raise UserError(f"--exit: found {args.exit:g}, expected a share such as 0.03")


def serve(args: argparse.Namespace) -> None:
    run = open_run(args)
    from headrace.inference.serve import http as serve_http

    serve_http.serve(run, host=args.host, port=args.port, slots=args.slots, length=args.length)


def export(args: argparse.Namespace) -> None:
    is_file = str(args.folder).endswith(".gguf")
    if args.dtype.startswith("q") and not is_file:
        raise UserError(f"--dtype: found {args.dtype}, which only .gguf files have; see `headrace quantize`")
    if args.packed and is_file:
        raise UserError("--packed: expected nothing, since ternary matrices go into folders alone")
    if args.adapter and (args.packed or is_file or args.dtype != "float32"):
        raise UserError("--adapter: expected a folder and no other option: adapters are written in float32")
    run = open_run(args)
    from headrace.convert import gguf, peft, to_huggingface

    if is_file:
        files = [gguf.export(run, args.folder, args.dtype)]
    elif args.adapter:
        files = peft.export(run, args.folder)
    else:
        files = to_huggingface.export(run, args.folder, args.dtype, packed=args.packed)
    for path in files:
        print(f"{path}  {path.stat().st_size:,} bytes")


def quantize(args: argparse.Namespace) -> None:
    from headrace.config import recipe

    qat = recipe.load_run(args.run).qat
    if qat is not None:  # training saw the numbers that are to be stored
        if args.method or args.bits or args.overrides:
            raise UserError(f"quantize: expected no method, since {args.run} was trained in {qat.bits} bits")
        name, settings = "rtn", [f"bits={qat.bits}", f"group_size={qat.group_size}"]
    else:
        name, settings = args.method or "gptq", [] if args.bits is None else [f"bits={args.bits}"]
    method = recipe.load_method(name, [*settings, *args.overrides])
    # Many programs that run seldom: on a GPU, XLA would look longer for the fastest of Triton's products than
    # it then saves. On an H200, 8 small layers took 70 to 90 s of compiling with it, 53 to 65 s in all now.
    has_gpu = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if has_gpu and "xla_gpu_enable_triton_gemm" not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_triton_gemm=false"
    run = open_run(args)
    from headrace.quantize import run as quantize_run

    target = args.to or f"{str(args.run).rstrip('/')}-{name if qat is None else 'qat'}-{method.bits}"
    data = args.data or run.recipe.data.path
    request = quantize_run.QuantizeRequest(target, method, args.samples, args.dtype, data)
    for path in quantize_run.quantize(run, request, print):
        print(f"{path}  {path.stat().st_size:,} bytes")


def import_(args: argparse.Namespace) -> None:
    from headrace.checkpoint import open_hf
    from headrace.convert import to_huggingface

    cfg = to_huggingface.import_(args.folder, args.run)
    if passed := open_hf.ignored_note(cfg.model, open_hf.weight_paths(cfg.model), Path(args.folder)):
        print(passed)
    tries = f"`headrace generate {args.run}` tries it, and" if cfg.model.causal else "now"
    print(f"{args.run}: {cfg.model.use} imported; {tries}")
    print(f"`headrace train {args.run}/recipe.yaml data.path=DATA` trains it further")


def recipe_show(args: argparse.Namespace) -> None:
    from headrace.config import reader, recipe

    print(reader.to_yaml(recipe.load_any(args.recipe, args.overrides)), end="")


def recipe_check(args: argparse.Namespace) -> None:
    from headrace.config import recipe

    recipe.load_any(args.recipe, args.overrides)
    print(f"{args.recipe}: fine")


def recipe_list(args: argparse.Namespace) -> None:
    paths = sorted(Path(args.folder).rglob("*.yaml"))
    if not paths:
        raise UserError(f"{args.folder}: found no .yaml file in it, expected a folder of recipes")
    width = max(len(str(path)) for path in paths)
    for path in paths:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        says = first.removeprefix("#").strip() if first.startswith("#") else ""
        print(f"{path!s:{width}}  {says}".rstrip())


def recipe_explain(args: argparse.Namespace) -> None:
    from headrace.config import explain

    print(explain.explain(args.key))


def recipe_schema(args: argparse.Namespace) -> None:
    import json

    from headrace.config import json_schema, sections

    print(
        json.dumps(json_schema.schema(sections.DataRecipe if args.data else sections.TrainRecipe), indent=2)
    )
