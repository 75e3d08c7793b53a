"""The command line of `headrace tpu`. It imports the code of a command only when the command runs."""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.cli.parser import Parser

    Commands = argparse._SubParsersAction[Parser]

SUMMARY = "rent TPU slices, train on them, delete them"


def add_tpu(commands: "Commands") -> None:
    """Add `tpu` and its commands."""
    group = commands.add_parser("tpu", help=SUMMARY, description=to_sentence(SUMMARY))
    actions = group.add_subparsers(metavar="COMMAND", required=True)
    add_rent_commands(actions)
    add_slice_commands(actions)
    add_disk_commands(actions)
    add_export_command(actions)
    parser = add_command(actions, "tensorboard", "show the curves of a run, also from a bucket")
    parser.add_argument("run", metavar="RUN", help="a run folder, or gs://BUCKET/RUN")
    parser.add_argument("--port", type=int, default=6006)


def add_rent_commands(actions: "Commands") -> None:
    """Add the commands that rent a slice: run and create."""
    summary = "rent a slice, train on all of it, replace it if it is lost, delete it at the end"
    parser = add_command(actions, "run", summary)
    parser.add_argument("recipe", metavar="RECIPE", help="a .yaml file")
    add_overrides(parser)
    add_rent_options(parser)
    parser.add_argument("--keep", action="store_true", help="do not delete the slice at the end")
    text = "also use a slice of this name that another user made, and leave it running at the end"
    parser.add_argument("--adopt", action="store_true", help=text)
    text = "pass an environment variable to the trainer, such as WANDB_API_KEY; its value is never stored"
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help=text)
    parser.add_argument("--far-bucket", action="store_true", help="allow a bucket in another region")
    add_rent_options(add_command(actions, "create", "rent a slice, and wait until it is ready"))


def add_slice_commands(actions: "Commands") -> None:
    """Add the commands for slices that exist."""
    summary = "send the working tree to all workers, and install the locked environment"
    add_name(add_command(actions, "install", summary, "install_all"))
    add_name(add_command(actions, "push", "send the working tree to all workers"))
    parser = add_name(add_command(actions, "logs", "follow the output of the workers", module="tpu_status"))
    parser.add_argument("--whole", action="store_true", help="from the beginning (default: the last lines)")
    add_name(add_command(actions, "status", "print the state of a slice and its job", module="tpu_status"))
    parser = add_name(add_command(actions, "ssh", "open a shell on a worker, or run a command there"))
    parser.add_argument("words", metavar="-- COMMAND", nargs="*", help="command to run instead of a shell")
    parser.add_argument("--worker", default="0", metavar="N", help="its number, or all (default: 0)")
    summary = "let the trainer on a slice save, delete the slice, and wait until it is gone"
    parser = add_name(add_command(actions, "delete", summary))
    text = "without a save, even if the slice is not yours or is watched"
    parser.add_argument("--force", action="store_true", help=text)
    summary = "list slices, their age, and when they delete themselves"
    parser = add_location(add_command(actions, "ls", summary, module="tpu_status"))
    text = "only slices that are not watched from this machine, and disks that no slice uses"
    parser.add_argument("--orphans", action="store_true", help=text)
    parser.add_argument("--everybody", action="store_true", help="with --orphans: also those of other users")
    parser.set_defaults(name=None)


def add_command(
    group: "Commands", name: str, summary: str, function: str = "", module: str = "tpu"
) -> argparse.ArgumentParser:
    """Add a command that runs `function`, by default the one of its own name, in headrace.cli.`module`."""
    parser = group.add_parser(name, help=summary, description=to_sentence(summary))
    parser.set_defaults(command=import_on_call(module, function or name))
    return parser


def import_on_call(module: str, function: str) -> Callable[[argparse.Namespace], int | None]:
    """A function that imports `module` of headrace.cli and calls `function` in it."""

    def call(args: argparse.Namespace) -> int | None:
        code: int | None = getattr(importlib.import_module(f"headrace.cli.{module}"), function)(args)
        return code

    return call


def to_sentence(summary: str) -> str:
    """The summary of a command as the sentence that its own --help shows."""
    return summary[0].upper() + summary[1:] + "."


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add key=value arguments."""
    text = "settings that replace those of the recipe"
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def add_location(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that name a cloud and a place in it."""
    text = "gcp, or local: processes of this machine instead of TPUs (default: gcp)"
    parser.add_argument("--platform", choices=["gcp", "local"], default="gcp", help=text)
    return add_google_location(parser)


def add_google_location(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options that name a place in Google Cloud, and the ssh key."""
    parser.add_argument("--project", metavar="NAME", help="of Google Cloud (default: gcloud's)")
    text = "such as us-central2-b; if there are several, they are tried in this order"
    parser.add_argument("--zone", action="append", default=[], metavar="ZONE", help=text)
    text = "your private ssh key (default: that of gcloud, or of ssh)"
    parser.add_argument("--ssh-key", type=Path, metavar="FILE", help=text)
    return parser


def add_name(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the name of a slice and its location."""
    parser.add_argument("name", metavar="NAME", help="of the slice")
    return add_location(parser)


def add_rent_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a slice to rent."""
    parser.add_argument("--slice", required=True, metavar="NAME", help="v4-32, v5e-16, 2xv5e-256, ...")
    text = "of the slice (default: from the recipe, or its size)"
    parser.add_argument("--name", metavar="NAME", help=text)
    add_location(parser)
    terms = parser.add_mutually_exclusive_group()
    text = "cheap, but may be taken away at any time"
    terms.add_argument("--spot", dest="terms", action="store_const", const="spot", help=text)
    text = "from your reservation (default: on demand)"
    terms.add_argument("--reserved", dest="terms", action="store_const", const="reserved", help=text)
    parser.set_defaults(terms="on-demand")
    text = "delete the slice after so many hours in total (default: 24)"
    parser.add_argument("--max-hours", type=float, metavar="N", help=text)
    text = "delete the slice after it cost so many dollars in total"
    parser.add_argument("--max-cost", type=float, metavar="N", help=text)
    parser.add_argument("--prices", type=Path, metavar="FILE", help="your own prices, as for `plan`")
    text = "minutes in the queue of a zone before the next one is tried (default: 10)"
    parser.add_argument("--wait", type=float, default=10.0, metavar="N", help=text)
    text = "a data disk, mounted read-only at /mnt/NAME of every worker"
    parser.add_argument("--disk", action="append", default=[], metavar="NAME", help=text)
    parser.add_argument("--runtime", default="", metavar="NAME", help="system image of the machines")
    text = "no addresses outside Google's network"
    parser.add_argument("--internal-ips", action="store_true", help=text)
    text = "only print gcloud commands that do the same"
    parser.add_argument("--dry-run", action="store_true", help=text)


def add_disk_commands(actions: "Commands") -> None:
    """Add `disk` and its commands."""
    summary = "manage data disks, filled once and mounted on every worker"
    group = actions.add_parser("disk", help=summary, description=to_sentence(summary))
    commands = group.add_subparsers(metavar="COMMAND", required=True)
    ls = add_command(commands, "ls", "list the disks that were made with Headrace", module="tpu_disk")
    add_google_location(ls)
    create = add_disk_command(commands, "create", "create a data disk")
    create.add_argument("--size", type=int, required=True, metavar="GB")
    create.add_argument("--type", metavar="NAME", help="of disk (default: one that the TPU accepts)")
    text = "the slice that will use it: v6e accepts other disks than v5e"
    create.add_argument("--slice", metavar="NAME", help=text)
    attach = add_disk_command(commands, "attach", "attach a data disk to a slice, and mount it at /mnt/DISK")
    attach.add_argument("--to", required=True, metavar="NAME")
    attach.add_argument("--write", action="store_true", help="to fill it, from a slice of one machine")
    detach = add_disk_command(commands, "detach", "detach a data disk from a slice")
    detach.add_argument("--from", dest="to", required=True, metavar="NAME")
    delete = add_disk_command(commands, "delete", "delete a data disk and everything on it")
    delete.add_argument("--force", action="store_true", help="even if it is not yours")


def add_disk_command(commands: "Commands", name: str, summary: str) -> argparse.ArgumentParser:
    """Add a command for one disk. There are none on this machine."""
    parser = add_command(commands, name, summary, module="tpu_disk")
    parser.add_argument("disk", metavar="DISK", help="its name")
    add_google_location(parser)
    parser.set_defaults(platform="gcp")
    return parser


def add_export_command(actions: "Commands") -> None:
    """Add `export`."""
    parser = add_command(actions, "export", "write the same run for another scheduler", module="tpu_export")
    parser.add_argument("recipe", metavar="RECIPE", help="a .yaml file")
    add_overrides(parser)
    parser.add_argument("--to", required=True, choices=["jobset", "skypilot", "slurm"])
    parser.add_argument("--slice", required=True, metavar="NAME", help="v4-32, gpu:h200x16, ...")
    parser.add_argument("--name", metavar="NAME", help="of the job (default: from the recipe)")
    parser.add_argument("--spot", action="store_true")
    parser.add_argument("--max-hours", type=float, metavar="N", help="of a Slurm job (default: 24)")
    parser.add_argument("--image", default="", metavar="NAME", help="a container with Headrace, for jobset")
    parser.add_argument("--runtime", default="", metavar="NAME", help="system image of the TPU VMs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="(default: standard output)")
