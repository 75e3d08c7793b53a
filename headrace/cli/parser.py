"""The commands of `headrace`, their arguments and help. The code of a command is imported when it runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace import __version__
from headrace.cli.arguments import (
    Parser,
    add_command,
    add_commands,
    add_group,
    add_overrides,
    add_recipe,
)
from headrace.cli.model_parser import add_conversion_commands, add_model_commands
from headrace.cli.tpu_parser import add_tpu

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands

TOP_EPILOG = """\
examples:
  headrace data prepare recipes/data/demo.yaml
  headrace train recipes/demo.yaml schedule.steps=200
  headrace eval runs/demo
  headrace generate runs/demo --prompt "def main("
  headrace export runs/demo exported

`headrace COMMAND --help` describes a command. The exit code is 0 on success, 2 on a mistake in the \
command, a recipe or the data, 3 if memory is too small, and 1 on an \
unexpected error; `headrace train --help` has more."""

TRAIN_DETAILS = """\
If the run folder (run_dir in the recipe) has a checkpoint, training resumes from the newest one that is \
intact. After a crash, a hang or a lost host, training restarts by itself."""

TRAIN_EPILOG = r"""
examples:
  headrace train recipes/demo.yaml                              train, or resume
  headrace train recipes/demo.yaml schedule.steps=1000          train longer
  headrace train recipes/demo.yaml run_dir=runs/b seed=1        start a second run
  headrace recipe show recipes/demo.yaml                        show all settings and their defaults

Press Ctrl-C once to save a checkpoint and stop. Press it again to stop without saving.

exit codes:
  0   finished
  1   unexpected error, or too many bad steps
  2   mistake in the command, the recipe or the data
  3   out of memory
  75  stopped early, checkpoint saved: run the same command to resume
  74  storage or network not responding  \
  76  a step hung                         |  after several
  77  hardware fault on this machine      |  automatic restarts
  78  lost connection to another host    /"""

PLAN_DETAILS = """\
For TPUs the chip's own compiler compiles the training step, which takes a minute or two and needs libtpu, \
but no TPU. GPUs, models far too large for the slice and --fast are planned by arithmetic."""

PLAN_EPILOG = """\
examples:
  headrace plan recipes/llama3-8b.yaml --slice v5p-32                     memory, speed and cost on a slice
  headrace plan recipes/llama3-8b.yaml --slice v5p-32 --slice v6e-16      compare two slices
  headrace plan recipes/llama3-8b.yaml --slice v5p-32 --search            find the fastest settings
  headrace plan recipes/llama3-8b.yaml --recommend --days 7               find slices that finish in a week

The exit code is 3 if the recipe does not fit."""

DATA_EPILOG = """\
example:
  headrace data prepare recipes/data/demo.yaml      normalize, train a tokenizer, pack and shuffle
  headrace data inspect data/demo                   look at some training sequences"""

# The commands that run stages of the data pipeline, with the last stage that they run, and what they do.
STAGES = [
    ("prepare", "shuffle", "run all stages: normalize, tokenizer, pack, shuffle"),
    ("normalize", "normalize", "run the first stage only: convert any format to Parquet files of documents"),
    ("tokenizer", "tokenizer", "run the stages up to tokenizer: train a tokenizer, or load one"),
    ("pack", "pack", "run the stages up to pack: tokenize documents and pack them into sequences"),
    ("shuffle", "shuffle", "run the stages up to shuffle, the last one: store sequences in random order"),
]


def make_parser() -> Parser:
    """Make the parser of `headrace`."""
    parser = Parser(
        prog="headrace",
        description="Train language models on TPUs, GPUs and CPUs, from raw text to an exported model.",
        epilog=TOP_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"headrace {__version__}")
    commands = add_commands(parser)
    add_data(commands)
    add_train(commands)
    add_model_commands(commands)
    add_report(commands)
    add_conversion_commands(commands)
    add_checkpoint(commands)
    add_recipe_commands(commands)
    add_plan(commands)
    add_doctor(commands)
    add_tpu(commands)
    return parser


def add_data(commands: "Commands") -> None:
    """Add `data` and its commands."""
    group = add_group(commands, "data", "prepare text for training, and inspect the result", DATA_EPILOG)
    for name, last_stage, summary in STAGES:
        details = "A stage that is finished is skipped, and one that was interrupted resumes."
        parser = add_command(group, name, summary, "data", "prepare", details=details)
        add_recipe(parser, "YAML file that describes the data", "tokenizer.vocab=32000")
        text = "replace finished data that was made by another recipe or from files that changed since"
        parser.add_argument("--replace", action="store_true", help=text)
        parser.set_defaults(until=last_stage)
    summary = "print some training sequences, with document boundaries and loss mask in color"
    parser = add_command(group, "inspect", summary, "data")
    parser.add_argument("folder", metavar="FOLDER", help="folder that `headrace data prepare` wrote")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="number of sequences (default: 4)")
    text = "split to read from (default: train)"
    parser.add_argument("--split", choices=["train", "evaluation"], default="train", help=text)
    text = "seed by which sequences are chosen (default: 0)"
    parser.add_argument("--seed", type=int, default=0, metavar="N", help=text)
    parser = add_command(group, "verify", "check checksums, token ids and counts of packed data", "data")
    parser.add_argument("folder", metavar="FOLDER", help="folder that `headrace data prepare` wrote")


def add_train(commands: "Commands") -> None:
    """Add `train`."""
    parser = add_command(
        commands,
        "train",
        "train a model, or resume a run that was interrupted",
        "train",
        details=TRAIN_DETAILS,
        epilog=TRAIN_EPILOG,
    )
    text = "YAML file that describes the run; `headrace recipe list` shows examples"
    add_recipe(parser, text)
    text = "train in this process, without automatic restarts (for debuggers and job schedulers)"
    parser.add_argument("--once", action="store_true", help=text)
    text = "load the training step that `headrace plan --save DIR` compiled, if it was compiled for this "
    text += "recipe, these devices and this version of JAX"
    parser.add_argument("--program", type=Path, metavar="DIR", help=text)


def add_plan(commands: "Commands") -> None:
    """Add `plan`."""
    parser = add_command(
        commands,
        "plan",
        "predict memory, speed and cost of a recipe on TPU slices or GPUs",
        "plan",
        details=PLAN_DETAILS,
        epilog=PLAN_EPILOG,
    )
    add_recipe(parser)
    text = "slice to plan for: v5p-32, 2xv5e-256 (two slices), gpu:h200x8, ...; may be repeated"
    parser.add_argument("--slice", action="append", default=[], metavar="NAME", help=text)
    text = "by arithmetic only, within a second"
    parser.add_argument("--fast", action="store_true", help=text)
    text = "try meshes, remat and numbers of microbatches, and show the fastest that fits"
    parser.add_argument("--search", action="store_true", help=text)
    text = "with --search: write the recipe with the fastest settings"
    parser.add_argument("--write", type=Path, metavar="FILE", help=text)
    text = "find slices for the recipe; with --slice, find the model that the slice trains best"
    parser.add_argument("--recommend", action="store_true", help=text)
    text = "with --recommend: tokens to train on, e.g. 20B (default: those of the recipe)"
    parser.add_argument("--tokens", metavar="N", help=text)
    text = "days available for training (default: 30)"
    parser.add_argument("--days", type=float, metavar="N", help=text)
    text = "with --recommend: dollars available"
    parser.add_argument("--budget", type=float, metavar="N", help=text)
    text = "write the plans as a list of JSON objects"
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    text = "YAML file with your prices per chip-hour, e.g. `v5e: {on_demand: 1.2, spot: [0.2, 0.3]}`"
    parser.add_argument("--prices", type=Path, metavar="FILE", help=text)
    text = "keep the compiled training step, for `headrace train --program DIR`, and the compiler's reports"
    parser.add_argument("--save", type=Path, metavar="DIR", help=text)


def add_report(commands: "Commands") -> None:
    """Add `report`."""
    summary = "write an HTML page about a run: loss curves, speed, cost and restarts"
    parser = add_command(commands, "report", summary, "report", "write_report")
    parser.add_argument("run", metavar="RUN", help="run folder; the run may still be in progress")
    text = "file to write (default: RUN/report.html)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "first generate N texts with the newest checkpoint, for this report and later ones"
    parser.add_argument("--samples", type=int, metavar="N", help=text)


def add_checkpoint(commands: "Commands") -> None:
    """Add `checkpoint` and its commands."""
    group = add_group(commands, "checkpoint", "list, verify, prune and compare the checkpoints of a run")
    summary = "list the checkpoints of a run, and whether they are intact"
    add_checkpoint_command(group, "ls", summary)
    summary = "read checkpoints and compare them with their checksums"
    parser = add_checkpoint_command(group, "verify", summary)
    parser.add_argument("step", metavar="STEP", nargs="?", help="step to verify (default: all)")
    parser = add_checkpoint_command(group, "prune", "remove old temporary checkpoints")
    text = "keep the newest N that are intact"
    parser.add_argument("--keep", type=int, required=True, metavar="N", help=text)
    parser.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    summary = "show how the recipes and weights of two checkpoints differ"
    parser = add_checkpoint_command(group, "diff", summary)
    text = "two steps of the run, or another run folder: then the newest steps are compared"
    parser.add_argument("others", metavar="STEP", nargs="+", help=text)


def add_checkpoint_command(commands: "Commands", name: str, summary: str) -> Parser:
    """Add a command for the checkpoints of one run."""
    parser = add_command(commands, name, summary, "checkpoint")
    parser.add_argument("run", metavar="RUN", help="run folder")
    return parser


def add_recipe_commands(commands: "Commands") -> None:
    """Add `recipe` and its commands."""
    group = add_group(commands, "recipe", "list, check and explain recipes")
    add_recipe(add_command(group, "show", "print a recipe with all settings and their defaults", "recipe"))
    add_recipe(add_command(group, "check", "check a recipe for mistakes", "recipe"))
    parser = add_command(group, "list", "list the recipes in a folder", "recipe", "list_recipes")
    text = "folder to search (default: recipes)"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", default="recipes", help=text)
    parser = add_command(group, "explain", "explain a key or a section of recipes", "recipe")
    parser.add_argument("key", metavar="KEY", help="e.g. optimizer.max_grad_norm, or optimizer")
    summary = "print the JSON schema of recipes, for completion in editors"
    parser = add_command(group, "schema", summary, "recipe")
    text = "the schema of data recipes (default: of training recipes)"
    parser.add_argument("--data", action="store_true", help=text)


def add_doctor(commands: "Commands") -> None:
    """Add `doctor`."""
    summary = "check versions, devices, disk, network and data, and suggest fixes"
    parser = add_command(commands, "doctor", summary, "doctor", epilog="The exit code is 1 if a check fails.")
    text = "YAML file of a run, whose folder and data are checked too"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=text)
    add_overrides(parser)
