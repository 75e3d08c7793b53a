"""The command line: one short function a command. JAX is imported only by the commands that compute."""

import argparse
import difflib
import glob
import importlib.metadata
import importlib.util
import io
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from millrace import __version__, secret
from millrace.errors import UserError
from millrace.tpu import options

EXAMPLES = """\
examples:
  millrace data prepare recipes/data/demo.yaml
  millrace train recipes/demo.yaml schedule.steps=200
  millrace generate runs/demo --prompt "def main("
  millrace export runs/demo exported
  millrace tpu run --platform local --slice v4-16 recipes/demo.yaml
exit codes: 0 done, 2 a mistake in what was asked, 3 too large for the memory,
  74 a server did not answer, 75 stopped early (run it again), 76 a step hung, 77 a fault of this machine,
  78 another host was lost (all but 75 after `train` has tried again by itself), 1 anything else"""


STAGES = [  # the commands that make data, how far they go, and what they do
    ("prepare", "shuffle", "all stages: normalize, tokenizer, pack, shuffle; goes on where it was stopped"),
    ("normalize", "normalize", "the first stage: any format to parquet files of documents"),
    ("tokenizer", "tokenizer", "up to the second stage: train a tokenizer, or take one"),
    ("pack", "pack", "up to the third stage: documents to rows of tokens"),
    ("shuffle", "shuffle", "up to the last stage: rows in random order, ready to train on"),
]


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a letter shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    if argv is None:
        sys.excepthook = secret.excepthook
    try:
        args = parse(argv)
        args.is_program = argv is None
        leave_out_tpu()
        code = args.command(args) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        said = f"millrace: {secret.clean(str(error))}"  # with whatever was found, be it no letter at all
        print(said.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("millrace: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `millrace ... | head`: Python would complain once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if ended by SIGPIPE: whatever was being done is not finished
    except OSError as error:  # a folder that cannot be written, a full disk
        if not error.filename:
            raise
        print(f"millrace: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


def leave_out_tpu() -> None:
    """On a machine that has libtpu for `plan` but neither a TPU nor a GPU, JAX would load it all the same: it
    complains of what it does not find, and may bring down a profile."""
    devices = any(glob.glob(pattern) for pattern in ("/dev/accel*", "/dev/vfio/[0-9]*"))
    others = importlib.metadata.entry_points(group="jax_plugins")
    if importlib.util.find_spec("libtpu") and not devices and not others:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Settings may come after options too, which argparse does not expect."""
    top = parser()
    args, rest = top.parse_known_args(argv)
    if rest[:1] == ["--"] and hasattr(args, "words"):
        args.words, rest = rest[1:], []
    if rest and not (hasattr(args, "overrides") and all("=" in item and item[0] != "-" for item in rest)):
        top.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def train(args: argparse.Namespace) -> int:
    from millrace import recipe

    cfg = recipe.load_train(args.recipe, args.overrides)
    if args.program is not None and not args.program.is_dir():
        raise UserError(f"--program: no such folder: {args.program}")
    from millrace import supervise

    if args.is_program and not args.once:
        return supervise.Supervisor(cfg.run).watch()
    supervise.tie()
    from millrace import hosts, train

    with hosts.ending(is_program=args.is_program):
        return train.run(cfg, args.program)


def doctor(args: argparse.Namespace) -> int:
    from millrace import recipe

    cfg = recipe.load_train(args.recipe, args.overrides) if args.recipe else None
    from millrace import doctor

    return doctor.examine(cfg, args.recipe, args.overrides)


def plan(args: argparse.Namespace) -> int:
    from millrace import recipe

    cfg = recipe.load(args.recipe, args.overrides)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is planned for is elsewhere
    check_plan(args)
    from millrace.plan import command

    cfg = command.sized(cfg)
    if args.recommend:
        wish = dict(tokens=args.tokens, days=args.days, budget=args.budget)
        return command.recommend(cfg, args.slice, **wish, prices=args.prices)
    options = dict(fast=args.fast, out=args.json, prices=args.prices, save=args.save)
    if args.search:
        return command.tune(cfg, args.slice[0], **options, write=args.write)
    return command.run(cfg, args.slice, **options, days=args.days)


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
    from millrace import recipe

    cfg = recipe.load_data(args.recipe, args.overrides)
    from millrace.data.prepare import prepare

    prepare(cfg, print, until=args.until, replace=args.replace)


def data_inspect(args: argparse.Namespace) -> None:
    from millrace.data import show

    show.inspect(args.folder, split=args.split, rows=args.rows, seed=args.seed)


def data_verify(args: argparse.Namespace) -> None:
    from millrace.data.verify import verify

    verify(args.folder, print)


def checkpoint_ls(args: argparse.Namespace) -> None:
    from millrace import saved

    saved.listed(args.run, print)


def checkpoint_verify(args: argparse.Namespace) -> int:
    from millrace import saved

    return 0 if saved.verified(args.run, args.step, print) else 1


def checkpoint_prune(args: argparse.Namespace) -> None:
    from millrace import saved

    if args.keep < 1:
        raise UserError(f"--keep: found {args.keep}, expected 1 or more")
    saved.check_run(args.run)
    if args.dry_run:
        saved.pruned(args.run, args.keep, print, dry_run=True)
        return
    from millrace.lock import lock

    with lock(args.run, waiting=print):
        saved.pruned(args.run, args.keep, print)


def checkpoint_diff(args: argparse.Namespace) -> int:
    """1 if they differ, as `diff` has it."""
    from millrace import saved

    pairs = [(args.run, step) for step in args.others]
    if len(args.others) == 1:
        pairs = [(run, str(saved.newest(run, print))) for run in (args.run, *args.others)]
    if len(pairs) != 2:
        raise UserError("checkpoint diff: expected a run and two of its steps, or two runs")
    (run, step), (other, other_step) = [(name, saved.one(name, number)) for name, number in pairs]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leaves the accelerators to those who train
    from millrace.differences import differences

    print(f"{run} step {step} -> {other} step {other_step}")
    lines = list(differences(run, step, other, other_step))
    print("\n".join(lines))
    return 0 if all("are the same, bit for bit" in line for line in lines) else 1


def report(args: argparse.Namespace) -> None:
    if args.samples is not None and args.samples < 1:
        raise UserError(f"--samples: found {args.samples}, expected 1 or more")
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out: found a folder, {args.out}, expected a file")
    from millrace.report import command

    if args.samples is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # leaves the accelerators to those who train
        command.sample(args.run, args.samples)
    print(command.write(args.run, args.out))


def open_run(args: argparse.Namespace, overrides: Sequence[str] = ()) -> Any:
    """The run folder that a command names; its recipe is checked before JAX is imported."""
    from millrace import recipe

    cfg = recipe.load_run(args.run, overrides)
    from millrace import folder

    return folder.open_run(cfg, item={True: "ema", False: "params", None: None}[args.ema])


def evaluate(args: argparse.Namespace) -> None:
    run = open_run(args, args.overrides)
    from millrace import evaluate

    print(evaluate.spoken(evaluate.evaluate_run(run), run.cfg.objective))


def generate(args: argparse.Namespace) -> None:
    rounds = [] if args.recurrence is None else [f"model.recurrence={args.recurrence}"]
    if rounds or args.exit is not None:
        check_rounds(args)
    run = open_run(args, rounds)
    from millrace import draw, generate

    sampling = draw.Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    named = {name: getattr(args, name) for name in ("steps", "block", "order")}
    named = {name: value for name, value in named.items() if value is not None}
    pieces = generate.generate(run, args.prompt, args.tokens, sampling, named, args.exit or 0.0, args.pause)
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def check_rounds(args: argparse.Namespace) -> None:
    from millrace import recipe

    option = "--exit" if args.recurrence is None else "--recurrence"
    if not recipe.load_run(args.run).model.recurrence:
        raise UserError(
            f"{option}: expected nothing, since the run has no recurrent depth (model.recurrence)"
        )
    if args.recurrence is not None and args.recurrence < 1:
        raise UserError(f"--recurrence: found {args.recurrence}, expected 1 or more")
    if args.exit is not None and not 0 <= args.exit < math.inf:
        raise UserError(f"--exit: found {args.exit:g}, expected a share such as 0.03")


def export(args: argparse.Namespace) -> None:
    run = open_run(args)
    from millrace.export import adapter, huggingface

    if args.adapter:
        if args.packed or args.dtype != "float32":
            raise UserError("--adapter: expected no other option, since adapters are written in float32")
        files = adapter.export(run, args.folder)
    else:
        files = huggingface.export(run, args.folder, args.dtype, packed=args.packed)
    for path in files:
        print(f"{path}  {path.stat().st_size:,} bytes")


def quantize(args: argparse.Namespace) -> None:
    from millrace import recipe

    learnt = recipe.load_run(args.run).model
    if learnt.bits:  # training saw the numbers that are to be stored
        if args.method or args.bits or args.overrides:
            raise UserError(
                f"quantize: expected no method, since {args.run} was trained in {learnt.bits} bits"
            )
        name, settings = "rtn", [f"bits={learnt.bits}", f"group={learnt.bits_group}"]
    else:
        name, settings = args.method or "gptq", [] if args.bits is None else [f"bits={args.bits}"]
    method = recipe.load_method(name, [*settings, *args.overrides])
    run = open_run(args)
    from millrace.compress import command

    target = args.to or f"{str(args.run).rstrip('/')}-{'qat' if learnt.bits else name}-{method.bits}"
    data = args.data or run.cfg.data.path
    request = command.Request(target, method, args.samples, args.dtype, data)
    for path in command.quantize(run, request, print):
        print(f"{path}  {path.stat().st_size:,} bytes")


def import_(args: argparse.Namespace) -> None:
    from millrace.export import huggingface

    cfg = huggingface.import_(args.folder, args.run)
    tries = f"`millrace generate {args.run}` tries it, and" if cfg.model.causal else "now"
    print(f"{args.run}: {cfg.model.use} imported; {tries}")
    print(f"`millrace train {args.run}/recipe.yaml data.path=DATA` trains it further")


def recipe_show(args: argparse.Namespace) -> None:
    from millrace import config, recipe

    print(config.to_yaml(recipe.load_any(args.recipe, args.overrides)), end="")


def recipe_check(args: argparse.Namespace) -> None:
    from millrace import recipe

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


def recipe_schema(args: argparse.Namespace) -> None:
    import json

    from millrace import recipe, schema

    print(json.dumps(schema.schema(recipe.DataRun if args.data else recipe.Run), indent=2))


class Parser(argparse.ArgumentParser):
    """Tells a mistake as the rest of Millrace does: one line, the nearest name, exit code 2."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '?([^' ]+)'? \(choose from (.+)\)", message):
            valid = found[2].replace("'", "").split(", ")
            near = difflib.get_close_matches(found[1], valid, n=1)
            message = f"found {found[1]}, expected one of {', '.join(valid)}"
            message += f"; did you mean {near[0]}?" if near else ""
        elif message.startswith("unrecognized arguments: -"):
            message += "; settings are given as key=value, e.g. schedule.steps=100"
        raise UserError(f"command line: {message} (see `{self.prog} --help`)")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="millrace",
        description="Trains language models on TPUs, GPUs and CPUs, from raw text to an exported model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"millrace {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def add(group: Any, name: str, function: Any, summary: str) -> argparse.ArgumentParser:
        one = group.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        one.set_defaults(command=function)
        return one

    def with_overrides(one: argparse.ArgumentParser, whose: str = "the recipe") -> None:
        text = f"settings that replace those of {whose}"
        one.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)

    def with_run(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
        one.add_argument("run", metavar="RUN", help="a run folder")
        text = "take the averaged weights (optimizer.ema), or not (default: where the run keeps them)"
        one.add_argument("--ema", action=argparse.BooleanOptionalAction, help=text)
        return one

    def with_recipe(one: argparse.ArgumentParser) -> None:
        one.add_argument("recipe", metavar="RECIPE", help="a .yaml file")
        with_overrides(one)

    one = add(commands, "train", train, "train a model; resumes by itself if the run folder has checkpoints")
    with_recipe(one)
    text = "start from the step that `plan --save DIR` compiled for these devices"
    one.add_argument("--program", type=Path, metavar="DIR", help=text)
    text = "train in this process, and do not start again after a crash"
    one.add_argument("--once", action="store_true", help=text)

    one = add(commands, "plan", plan, "tell whether a recipe fits a slice, how fast it is and what it costs")
    with_recipe(one)
    one.add_argument("--slice", action="append", default=[], metavar="NAME", help="v5p-32, 2xv5e-256, ...")
    one.add_argument("--fast", action="store_true", help="by arithmetic alone, in a second")
    one.add_argument("--json", type=Path, metavar="FILE", help="write what was found, a list of objects")
    one.add_argument("--prices", type=Path, metavar="FILE", help="prices of your own, in YAML")
    one.add_argument("--save", type=Path, metavar="DIR", help="keep the program, and what is said of it")
    one.add_argument("--search", action="store_true", help="try meshes, remat and parts of the batch")
    text = "with --search: a recipe with the best settings"
    one.add_argument("--write", type=Path, metavar="FILE", help=text)
    one.add_argument(
        "--recommend", action="store_true", help="which slice to rent; with --slice, what it trains best"
    )
    one.add_argument("--tokens", metavar="N", help="with --recommend: 20B, in place of the recipe's")
    one.add_argument("--days", type=float, metavar="N", help="that there are (default: 30)")
    one.add_argument("--budget", type=float, metavar="N", help="with --recommend: dollars")

    data = commands.add_parser("data", help="turn text into packed tokens").add_subparsers(
        metavar="COMMAND", required=True
    )
    for name, until, summary in STAGES:
        one = add(data, name, data_prepare, summary)
        with_recipe(one)
        one.add_argument("--replace", action="store_true", help="replace finished data of another recipe")
        one.set_defaults(until=until)
    one = add(data, "inspect", data_inspect, "print real examples, documents and loss mask in colours")
    one.add_argument("folder", metavar="FOLDER", help="what `data prepare` made, or a stage of it")
    one.add_argument("--rows", type=int, default=4, help="how many (default: 4)")
    one.add_argument("--split", choices=["train", "evaluation"], default="train")
    one.add_argument("--seed", type=int, default=0, help="draws other rows")
    one = add(data, "verify", data_verify, "check packed data: checksums, token range, counts")
    one.add_argument("folder", metavar="FOLDER", help="what `data prepare` made")

    kept = commands.add_parser("checkpoint", help="look after the checkpoints of a run").add_subparsers(
        metavar="COMMAND", required=True
    )
    one = add(kept, "ls", checkpoint_ls, "list the checkpoints of a run, and whether they are whole")
    one.add_argument("run", metavar="RUN", help="a run folder")
    one = add(kept, "verify", checkpoint_verify, "read checkpoints and compare them with their manifests")
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.add_argument("step", metavar="STEP", nargs="?", help="one of them (default: all)")
    one = add(kept, "prune", checkpoint_prune, "remove old temporary checkpoints")
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.add_argument("--keep", type=int, required=True, metavar="N", help="the newest N stay")
    one.add_argument("--dry-run", action="store_true", help="only say which")
    one = add(kept, "diff", checkpoint_diff, "tell how recipes and weights of two checkpoints differ")
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.add_argument("others", metavar="STEP", nargs="+", help="two of its steps, or another run folder")

    options.add_to(commands)

    one = add(
        commands, "report", report, "write one HTML page about a run: how it is, what it cost, its curves"
    )
    one.add_argument("run", metavar="RUN", help="a run folder, also of a run that goes on")
    one.add_argument("--out", type=Path, metavar="FILE", help="where to (default: RUN/report.html)")
    text = "have the newest checkpoint write so many texts, for this report and those after it"
    one.add_argument("--samples", type=int, metavar="N", help=text)

    one = with_run(add(commands, "eval", evaluate, "print loss, perplexity and bits a byte of held-out data"))
    with_overrides(one, "the run's recipe")

    one = with_run(add(commands, "generate", generate, "continue a text"))
    one.add_argument("--prompt", default="", help="the text to continue")
    one.add_argument("--tokens", type=int, default=128, help="how many at most (default: 128)")
    one.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest (default: 0.8)")
    one.add_argument(
        "--top-k", type=int, default=50, help="draw among the k likeliest, 0 for all (default: 50)"
    )
    one.add_argument(
        "--top-p", type=float, default=1.0, help="draw among the likeliest that reach p (default: 1)"
    )
    one.add_argument("--seed", type=int, default=0)
    text = "pause tokens after the prompt, if it was trained with them (pack.pause)"
    one.add_argument("--pause", type=int, default=0, metavar="N", help=text)
    text = "of a diffusion model: told in so many steps (default: one for each token)"
    one.add_argument("--steps", type=int, metavar="N", help=text)
    text = "of a diffusion model: so many tokens are done before the next are begun (default: all at once)"
    one.add_argument("--block", type=int, metavar="N", help=text)
    text = "of a diffusion model: the surest tokens first, any, or each by chance (default: confident)"
    one.add_argument("--order", choices=["confident", "random", "ancestral"], help=text)
    text = "with recurrent depth: rounds of the layers in the middle (default: as the run was trained)"
    one.add_argument("--recurrence", type=int, metavar="N", help=text)
    text = "with recurrent depth: no further round once one changes less than this share, 0.03"
    one.add_argument("--exit", type=float, metavar="SHARE", help=text)

    one = with_run(add(commands, "export", export, "write a Hugging Face model folder"))
    one.add_argument("folder", metavar="DIR", help="a new folder")
    one.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    one.add_argument("--packed", action="store_true", help="ternary matrices in 2 bits a weight")
    text = "the adapters alone (model.lora_rank), for peft; without it they are merged into the model"
    one.add_argument("--adapter", action="store_true", help=text)

    one = with_run(
        add(commands, "quantize", quantize, "write a model whose matrices take a few bits a weight")
    )
    with_overrides(one, "the method")
    one.add_argument("--method", metavar="NAME", help="rtn, gptq or vptq (default: gptq)")
    one.add_argument("--bits", type=int, metavar="N", help="of a weight (default: the method's)")
    one.add_argument("--to", metavar="DIR", help="a new folder (default: RUN-METHOD-BITS)")
    one.add_argument("--data", metavar="FOLDER", help="packed data to calibrate on (default: the run's)")
    one.add_argument("--samples", type=int, default=128, metavar="N", help="rows of it (default: 128)")
    text = "of what is not quantised (default: float16)"
    one.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float16", help=text)

    one = add(commands, "import", import_, "make a run folder of a Hugging Face model folder")
    one.add_argument("folder", metavar="DIR", help="config.json, *.safetensors and tokenizer.json")
    one.add_argument("run", metavar="RUN", help="a new run folder")

    summary = "look for what may keep a run from working: devices, versions, disk, bucket, clock, ports"
    one = add(commands, "doctor", doctor, summary)
    one.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a .yaml file: its run and data are looked at too"
    )
    with_overrides(one)

    recipes = commands.add_parser("recipe", help="look at recipes").add_subparsers(
        metavar="COMMAND", required=True
    )
    with_recipe(add(recipes, "show", recipe_show, "print a recipe with every key in it"))
    with_recipe(add(recipes, "check", recipe_check, "say what is wrong with a recipe, if anything"))
    one = add(recipes, "list", recipe_list, "list the recipes of a folder")
    one.add_argument("folder", metavar="FOLDER", nargs="?", default="recipes")
    one = add(recipes, "schema", recipe_schema, "print every key as a JSON schema, for editors")
    one.add_argument("--data", action="store_true", help="of data recipes")
    return top


if __name__ == "__main__":
    sys.exit(main())
