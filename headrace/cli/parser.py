"""The options of the command line: names and help alone."""

import argparse
import difflib
import re
from pathlib import Path
from typing import Any, NoReturn

from headrace import __version__
from headrace.cli import commands, tpu_parser
from headrace.cli.tpu_parser import import_on_call
from headrace.errors import UserError

EXAMPLES = """\
examples:
  headrace data prepare recipes/data/demo.yaml
  headrace train recipes/demo.yaml schedule.steps=200
  headrace generate runs/demo --prompt "def main("
  headrace export runs/demo exported
  headrace tpu run --platform local --slice v4-16 recipes/demo.yaml
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


class Parser(argparse.ArgumentParser):
    """Tells a mistake as the rest of Headrace does: one line, the nearest name, exit code 2."""

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
        prog="headrace",
        description="Trains language models on TPUs, GPUs and CPUs, from raw text to an exported model.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"headrace {__version__}")
    every = top.add_subparsers(metavar="COMMAND", required=True)
    for group in (add_train, data, checkpoint, tpu_parser.add_tpu, add_inspect, add_convert, recipe):
        group(every)
    return top


def add_train(top: Any) -> None:
    one = add(
        top, "train", commands.train, "train a model; resumes by itself if the run folder has checkpoints"
    )
    with_recipe(one)
    text = "start from the step that `plan --save DIR` compiled for these devices"
    one.add_argument("--program", type=Path, metavar="DIR", help=text)
    text = "train in this process, and do not start again after a crash"
    one.add_argument("--once", action="store_true", help=text)

    one = add(
        top, "plan", commands.plan, "tell whether a recipe fits a slice, how fast it is and what it costs"
    )
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


def data(top: Any) -> None:
    data = top.add_parser("data", help="turn text into packed tokens").add_subparsers(
        metavar="COMMAND", required=True
    )
    for name, until, summary in STAGES:
        one = add(data, name, commands.data_prepare, summary)
        with_recipe(one)
        one.add_argument("--replace", action="store_true", help="replace finished data of another recipe")
        one.set_defaults(until=until)
    one = add(
        data, "inspect", commands.data_inspect, "print real examples, documents and loss mask in colors"
    )
    one.add_argument("folder", metavar="FOLDER", help="what `data prepare` made, or a stage of it")
    one.add_argument("--rows", type=int, default=4, help="how many (default: 4)")
    one.add_argument("--split", choices=["train", "evaluation"], default="train")
    one.add_argument("--seed", type=int, default=0, help="draws other rows")
    one = add(data, "verify", commands.data_verify, "check packed data: checksums, token range, counts")
    one.add_argument("folder", metavar="FOLDER", help="what `data prepare` made")


def checkpoint(top: Any) -> None:
    kept = top.add_parser(
        "checkpoint", help="list, verify, prune and compare the checkpoints of a run"
    ).add_subparsers(metavar="COMMAND", required=True)
    one = add(
        kept,
        "ls",
        import_on_call("checkpoint", "ls"),
        "list the checkpoints of a run, and whether they are intact",
    )
    one.add_argument("run", metavar="RUN", help="a run folder")
    one = add(
        kept,
        "verify",
        import_on_call("checkpoint", "verify"),
        "read checkpoints and compare them with their manifests",
    )
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.add_argument("step", metavar="STEP", nargs="?", help="one of them (default: all)")
    one = add(kept, "prune", import_on_call("checkpoint", "prune"), "remove old temporary checkpoints")
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.add_argument("--keep", type=int, required=True, metavar="N", help="the newest N stay")
    one.add_argument("--dry-run", action="store_true", help="only say which")
    one = add(
        kept,
        "diff",
        import_on_call("checkpoint", "diff"),
        "show how the recipes and weights of two checkpoints differ",
    )
    one.add_argument("run", metavar="RUN", help="a run folder")
    one.add_argument("others", metavar="STEP", nargs="+", help="two of its steps, or another run folder")


def add_inspect(top: Any) -> None:
    one = add(
        top, "report", commands.report, "write one HTML page about a run: how it is, what it cost, its curves"
    )
    one.add_argument("run", metavar="RUN", help="a run folder, also of a run that goes on")
    one.add_argument("--out", type=Path, metavar="FILE", help="where to (default: RUN/report.html)")
    text = "have the newest checkpoint write so many texts, for this report and those after it"
    one.add_argument("--samples", type=int, metavar="N", help=text)

    one = with_run(
        add(top, "eval", commands.evaluate, "print loss, perplexity and bits a byte of held-out data")
    )
    with_overrides(one, "the run's recipe")
    text = "instead, tasks of lm-evaluation-harness by name or .yaml file, with commas (headrace[eval])"
    one.add_argument("--tasks", metavar="NAMES", help=text)
    one.add_argument("--limit", type=int, metavar="N", help="examples of each task (default: all)")
    one.add_argument("--batch", type=int, metavar="N", help="texts at a time (default: 8)")

    one = with_run(add(top, "generate", commands.generate, "continue a text"))
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
    text = "pause tokens after the prompt, if it was trained with them (pack.pause_tokens)"
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

    one = with_run(
        add(top, "serve", commands.serve, "look at a model: OpenAI's interface and a page to chat")
    )
    text = "where to listen (default: 127.0.0.1, which only this machine reaches)"
    one.add_argument("--host", default="127.0.0.1", help=text)
    one.add_argument("--port", type=int, default=8000, help="0 takes one that is free (default: 8000)")
    text = "texts that are continued at once (default: 8)"
    one.add_argument("--slots", type=int, default=8, metavar="N", help=text)
    text = "tokens of a prompt and its answer together (default: the run's data.sequence_length)"
    one.add_argument("--length", type=int, metavar="N", help=text)


def add_convert(top: Any) -> None:
    one = with_run(add(top, "export", commands.export, "write a Hugging Face model folder, or a .gguf file"))
    one.add_argument("folder", metavar="TARGET", help="a new folder, or a file NAME.gguf for llama.cpp")
    text = "of the weights; q8_0 and q4_0 are for .gguf files (default: float32)"
    kinds = ["float32", "bfloat16", "float16", "q8_0", "q4_0"]
    one.add_argument("--dtype", choices=kinds, default="float32", help=text)
    one.add_argument("--packed", action="store_true", help="ternary matrices in 2 bits a weight")
    text = "the adapters alone (lora.rank), for peft; without it they are merged into the model"
    one.add_argument("--adapter", action="store_true", help=text)

    one = with_run(
        add(top, "quantize", commands.quantize, "write a model whose matrices take a few bits a weight")
    )
    with_overrides(one, "the method")
    one.add_argument("--method", metavar="NAME", help="rtn, gptq or vptq (default: gptq)")
    one.add_argument("--bits", type=int, metavar="N", help="of a weight (default: the method's)")
    one.add_argument("--to", metavar="DIR", help="a new folder (default: RUN-METHOD-BITS)")
    one.add_argument("--data", metavar="FOLDER", help="packed data to calibrate on (default: the run's)")
    one.add_argument("--samples", type=int, default=128, metavar="N", help="rows of it (default: 128)")
    text = "of what is not quantised (default: float16)"
    one.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float16", help=text)

    one = add(top, "import", commands.import_, "make a run folder of a Hugging Face model folder")
    one.add_argument("folder", metavar="DIR", help="config.json, *.safetensors and tokenizer.json")
    one.add_argument("run", metavar="RUN", help="a new run folder")


def recipe(top: Any) -> None:
    summary = "look for what may keep a run from working: devices, versions, disk, bucket, clock, ports"
    one = add(top, "doctor", commands.doctor, summary)
    one.add_argument(
        "recipe", metavar="RECIPE", nargs="?", help="a .yaml file: its run and data are looked at too"
    )
    with_overrides(one)

    recipes = top.add_parser("recipe", help="look at recipes").add_subparsers(
        metavar="COMMAND", required=True
    )
    with_recipe(add(recipes, "show", commands.recipe_show, "print a recipe with every key in it"))
    with_recipe(add(recipes, "check", commands.recipe_check, "say what is wrong with a recipe, if anything"))
    one = add(recipes, "list", commands.recipe_list, "list the recipes of a folder")
    one.add_argument("folder", metavar="FOLDER", nargs="?", default="recipes")
    one = add(recipes, "explain", commands.recipe_explain, "explain a key or a section of recipes")
    one.add_argument("key", metavar="KEY", help="e.g. optimizer.max_grad_norm, or optimizer")
    one = add(recipes, "schema", commands.recipe_schema, "print every key as a JSON schema, for editors")
    one.add_argument("--data", action="store_true", help="of data recipes")


def add(group: Any, name: str, function: Any, summary: str) -> argparse.ArgumentParser:
    one = group.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    one.set_defaults(command=function)
    return one


def with_overrides(one: argparse.ArgumentParser, whose: str = "the recipe") -> None:
    text = f"settings that replace those of {whose}"
    one.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def with_run(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
    one.add_argument("run", metavar="RUN", help="a run folder")
    text = "take the averaged weights (optimizer.ema_decay), or not (default: where the run keeps them)"
    one.add_argument("--ema", action=argparse.BooleanOptionalAction, help=text)
    return one


def with_recipe(one: argparse.ArgumentParser) -> None:
    one.add_argument("recipe", metavar="RECIPE", help="a .yaml file")
    with_overrides(one)
