"""The command line of `headrace tpu`: names and help alone, so that nothing is imported before it is used."""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

SUMMARY = "rent TPU slices, train on them, give them back"


def add_to(commands: Any) -> None:
    """The group and its commands."""
    group = commands.add_parser("tpu", help=SUMMARY, description=SUMMARY[0].upper() + SUMMARY[1:] + ".")
    acts = group.add_subparsers(metavar="COMMAND", required=True)

    one = add(acts, "run", "rent a slice, train on all of it, take another if it is lost, give it back")
    one.add_argument("recipe", metavar="RECIPE", help="a .yaml file")
    overrides(one)
    rent(one)
    one.add_argument("--keep", action="store_true", help="do not delete the slice at the end")
    text = "also on a slice of that name that another user made, which is left at the end"
    one.add_argument("--adopt", action="store_true", help=text)
    text = "a variable of here that the trainer is to see, such as WANDB_API_KEY; its value is never stored"
    one.add_argument("--env", action="append", default=[], metavar="NAME", help=text)
    one.add_argument("--far-bucket", action="store_true", help="allow a bucket of another region")

    rent(add(acts, "create", "rent a slice, and wait until it is ready"))
    text = "send the working tree to all workers, and install the locked environment"
    named(add(acts, "install", text, "install_all"))
    named(add(acts, "push", "send the working tree to all workers"))
    one = named(add(acts, "logs", "follow what the workers say", module="look_command"))
    one.add_argument("--whole", action="store_true", help="from the beginning (default: the last lines)")
    named(add(acts, "status", "tell how a slice and its job are", module="look_command"))
    one = named(add(acts, "ssh", "open a shell on a worker, or run a command there"))
    one.add_argument("words", metavar="-- COMMAND", nargs="*", help="to run in place of a shell")
    one.add_argument("--worker", default="0", metavar="N", help="its number, or all (default: 0)")
    one = named(add(acts, "delete", "let who trains on a slice save, delete it, and look until it is gone"))
    one.add_argument(
        "--force", action="store_true", help="also one that is not yours or is watched; nobody saves"
    )
    one = at(
        add(acts, "ls", "list slices, their age, and when they end by themselves", module="look_command")
    )
    one.add_argument(
        "--orphans", action="store_true", help="only those that nobody here watches, and disks without one"
    )
    text = "with --orphans: also what other users made"
    one.add_argument("--everybody", action="store_true", help=text)

    disks(acts)
    exports(acts)
    one = add(acts, "tensorboard", "serve the curves of a run, out of its bucket")
    one.add_argument("run", metavar="RUN", help="a run folder, or gs://BUCKET/RUN")
    one.add_argument("--port", type=int, default=6006)


def add(
    group: Any, name: str, summary: str, function: str = "", module: str = "command"
) -> argparse.ArgumentParser:
    one: argparse.ArgumentParser = group.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + "."
    )
    one.set_defaults(command=later(module, function or name))
    return one


MODULES = {
    "command": "cli.tpu",
    "disk_command": "cli.tpu_disk",
    "export_command": "cli.tpu_export",
    "look_command": "cli.tpu_status",
}


def later(module: str, name: str) -> Callable[[argparse.Namespace], int | None]:
    """A function of a module, which is imported when it is called."""

    def call(args: argparse.Namespace) -> int | None:
        return getattr(importlib.import_module(f"headrace.{MODULES[module]}"), name)(args)

    return call


def overrides(one: argparse.ArgumentParser) -> None:
    text = "settings that replace those of the recipe"
    one.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=text)


def at(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
    text = "gcp, or local: processes of this machine in place of TPUs (default: gcp)"
    one.add_argument("--platform", choices=["gcp", "local"], default="gcp", help=text)
    return at_google(one)


def at_google(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
    one.add_argument("--project", metavar="NAME", help="of Google Cloud (default: gcloud's)")
    text = "such as us-central2-b; several are tried in turn"
    one.add_argument("--zone", action="append", default=[], metavar="ZONE", help=text)
    text = "your private key (default: that of gcloud, or of ssh)"
    one.add_argument("--ssh-key", type=Path, metavar="FILE", help=text)
    return one


def named(one: argparse.ArgumentParser) -> argparse.ArgumentParser:
    one.add_argument("name", metavar="NAME", help="of the slice")
    return at(one)


def rent(one: argparse.ArgumentParser) -> None:
    one.add_argument("--slice", required=True, metavar="NAME", help="v4-32, v5e-16, 2xv5e-256, ...")
    one.add_argument("--name", metavar="NAME", help="of the slice (default: after the recipe, or its size)")
    at(one)
    terms = one.add_mutually_exclusive_group()
    text = "cheap, and may be taken away at any time"
    terms.add_argument("--spot", dest="terms", action="store_const", const="spot", help=text)
    text = "out of your reservation (default: on demand)"
    terms.add_argument("--reserved", dest="terms", action="store_const", const="reserved", help=text)
    one.set_defaults(terms="on-demand")
    text = "hours of the slice in all, then it is deleted (default: 24)"
    one.add_argument("--max-hours", type=float, metavar="N", help=text)
    one.add_argument("--max-cost", type=float, metavar="N", help="dollars in all, then it is deleted")
    one.add_argument("--prices", type=Path, metavar="FILE", help="prices of your own, as for `plan`")
    text = "minutes in the queue of a zone before the next is tried (default: 10)"
    one.add_argument("--wait", type=float, default=10.0, metavar="N", help=text)
    text = "a data disk, read-only at /mnt/NAME of every worker"
    one.add_argument("--disk", action="append", default=[], metavar="NAME", help=text)
    one.add_argument("--runtime", default="", metavar="NAME", help="the system of the machines")
    one.add_argument("--internal-ips", action="store_true", help="no addresses outside of Google's network")
    one.add_argument(
        "--dry-run", action="store_true", help="print the same as gcloud commands, and do nothing"
    )


def disks(acts: Any) -> None:
    text = "look after data disks, filled once and mounted on every worker"
    group = acts.add_parser("disk", help=text, description=text[0].upper() + text[1:] + ".")
    kinds = group.add_subparsers(metavar="COMMAND", required=True)
    at_google(add(kinds, "ls", "list the disks that Headrace made", module="disk_command"))
    for act, summary in (
        ("create", "make a data disk"),
        ("attach", "attach a data disk to a slice, and mount it at /mnt/DISK"),
        ("detach", "take a data disk off a slice"),
        ("delete", "delete a data disk and all that is on it"),
    ):
        one = add(kinds, act, summary, "change", "disk_command")
        one.add_argument("disk", metavar="DISK", help="its name")
        at_google(one)
        one.set_defaults(act=act, platform="gcp")  # this machine has disks of its own
        if act == "create":
            one.add_argument("--size", type=int, required=True, metavar="GB")
            one.add_argument("--type", metavar="NAME", help="of disk (default: what the TPU takes)")
            one.add_argument("--slice", metavar="NAME", help="what it is for: v6e takes other disks than v5e")
        if act == "delete":
            one.add_argument("--force", action="store_true", help="also one that is not yours")
        if act in ("attach", "detach"):
            one.add_argument(
                "--to" if act == "attach" else "--from", dest="to", required=True, metavar="NAME"
            )
        if act == "attach":
            one.add_argument("--write", action="store_true", help="to fill it, from a slice of one machine")


def exports(acts: Any) -> None:
    one = add(acts, "export", "write the same run for another scheduler", module="export_command")
    one.add_argument("recipe", metavar="RECIPE", help="a .yaml file")
    overrides(one)
    one.add_argument("--to", required=True, choices=["jobset", "skypilot", "slurm"])
    one.add_argument("--slice", required=True, metavar="NAME", help="v4-32, gpu:h200x16, ...")
    one.add_argument("--name", metavar="NAME", help="of the job (default: after the recipe)")
    one.add_argument("--spot", action="store_true")
    one.add_argument("--max-hours", type=float, metavar="N", help="of a Slurm job (default: 24)")
    one.add_argument("--image", default="", metavar="NAME", help="a container with Headrace, for jobset")
    one.add_argument("--runtime", default="", metavar="NAME", help="the system of TPU VMs")
    one.add_argument("--out", type=Path, metavar="FILE", help="(default: standard output)")
