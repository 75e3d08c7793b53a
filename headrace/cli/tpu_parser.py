"""The arguments of `headrace tpu`."""

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.arguments import add_command, add_group, add_recipe

if TYPE_CHECKING:
    from headrace.cli.arguments import Commands, Parser

RUN_DETAILS = """\
If the slice is lost, another is requested, and training resumes from the last checkpoint. The slice is \
deleted at the end, on Ctrl-C and when --max-hours or --max-cost is reached, even if this machine is \
offline."""

RUN_EPILOG = """\
examples:
  headrace tpu run --slice v5e-16 --zone europe-west4-b --spot --max-cost 50 recipes/llama3.2-1b.yaml \\
      data.path=gs://BUCKET/data run_dir=gs://BUCKET/llama
  headrace tpu run --platform local --slice v4-16 recipes/demo.yaml      try it without a cloud"""


def add_tpu(commands: "Commands") -> None:
    """Add `tpu` and its commands."""
    group = add_group(commands, "tpu", "rent TPU slices, train on them, delete them")
    add_rent_commands(group)
    add_slice_commands(group)
    add_disk_commands(group)
    add_export_command(group)
    summary = "show the curves of a run in TensorBoard; the run may be in a bucket"
    parser = add_command(group, "tensorboard", summary, "tpu")
    parser.add_argument("run", metavar="RUN", help="run folder, or gs://BUCKET/RUN")
    parser.add_argument("--port", type=int, default=6006, metavar="N", help="port (default: 6006)")


def add_rent_commands(group: "Commands") -> None:
    """Add the commands that rent a slice: run and create."""
    summary = "rent a slice, train on all of it, and delete it at the end"
    parser = add_command(group, "run", summary, "tpu", details=RUN_DETAILS, epilog=RUN_EPILOG)
    add_recipe(parser)
    add_rent_options(parser)
    parser.add_argument("--keep", action="store_true", help="do not delete the slice at the end")
    text = "also use a slice of this name that another user made, and leave it running at the end"
    parser.add_argument("--adopt", action="store_true", help=text)
    text = "pass an environment variable to the trainer, such as WANDB_API_KEY; its value is never stored"
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help=text)
    text = "allow a bucket in another region than the slice"
    parser.add_argument("--far-bucket", action="store_true", help=text)
    add_rent_options(add_command(group, "create", "rent a slice, and wait until it is ready", "tpu"))


def add_slice_commands(group: "Commands") -> None:
    """Add the commands for slices that exist."""
    summary = "send the working tree to all workers, and install the locked environment"
    add_name(add_command(group, "install", summary, "tpu", "install_all"))
    add_name(add_command(group, "push", "send the working tree to all workers", "tpu"))
    parser = add_name(add_command(group, "logs", "follow the output of the workers", "tpu_status"))
    text = "start from the beginning (default: from the last lines)"
    parser.add_argument("--whole", action="store_true", help=text)
    add_name(add_command(group, "status", "show the status of a slice and its job", "tpu_status"))
    parser = add_name(add_command(group, "ssh", "open a shell on a worker, or run a command there", "tpu"))
    parser.add_argument("words", metavar="-- COMMAND", nargs="*", help="command to run instead of a shell")
    text = "number of the worker, or all (default: 0)"
    parser.add_argument("--worker", default="0", metavar="N", help=text)
    summary = "let the trainer save, delete the slice, and wait until it is gone"
    parser = add_name(add_command(group, "delete", summary, "tpu"))
    text = "delete it at once, without a save, even if it is not yours or is watched"
    parser.add_argument("--force", action="store_true", help=text)
    summary = "list slices, their age, and when they delete themselves"
    parser = add_command(group, "ls", summary, "tpu_status")
    add_location(parser)
    text = "only slices that are not watched from this machine, and disks that no slice uses"
    parser.add_argument("--orphans", action="store_true", help=text)
    text = "with --orphans: also those of other users"
    parser.add_argument("--everybody", action="store_true", help=text)
    parser.set_defaults(name=None)


def add_location(parser: "Parser") -> None:
    """Add the options that name a cloud and a place in it."""
    text = "Google Cloud, or processes of this machine instead of TPUs (default: gcp)"
    parser.add_argument("--platform", choices=["gcp", "local"], default="gcp", help=text)
    add_google_location(parser)


def add_google_location(parser: "Parser") -> None:
    """Add the options that name a place in Google Cloud, and the ssh key."""
    text = "project of Google Cloud (default: that of gcloud)"
    parser.add_argument("--project", metavar="NAME", help=text)
    text = "zone, such as us-central2-b; a new slice needs one or more, tried in this order"
    parser.add_argument("--zone", action="append", default=[], metavar="ZONE", help=text)
    text = "private ssh key (default: that of gcloud, or of ssh)"
    parser.add_argument("--ssh-key", type=Path, metavar="FILE", help=text)


def add_name(parser: "Parser") -> "Parser":
    """Add the name of a slice and its location."""
    parser.add_argument("name", metavar="NAME", help="name of the slice")
    add_location(parser)
    return parser


def add_rent_options(parser: "Parser") -> None:
    """Add the options that describe a slice to rent."""
    text = "type of the slice: v4-32, v5e-16, 2xv5e-256 (two slices), ..."
    parser.add_argument("--slice", required=True, metavar="TYPE", help=text)
    text = "name of the slice (default: from the recipe, or its type)"
    parser.add_argument("--name", metavar="NAME", help=text)
    add_location(parser)
    terms = parser.add_mutually_exclusive_group()
    text = "cheaper, but may be taken away at any time"
    terms.add_argument("--spot", dest="terms", action="store_const", const="spot", help=text)
    text = "from your reservation (default: on demand)"
    terms.add_argument("--reserved", dest="terms", action="store_const", const="reserved", help=text)
    parser.set_defaults(terms="on-demand")
    text = "delete the slice after N hours in total (default: 24)"
    parser.add_argument("--max-hours", type=float, metavar="N", help=text)
    text = "delete the slice when it has cost N dollars in total"
    parser.add_argument("--max-cost", type=float, metavar="N", help=text)
    text = "YAML file with your prices per chip-hour, as for `headrace plan`"
    parser.add_argument("--prices", type=Path, metavar="FILE", help=text)
    text = "minutes to wait in the queue of a zone before the next is tried (default: 10)"
    parser.add_argument("--wait", type=float, default=10.0, metavar="N", help=text)
    text = "data disk to mount read-only at /mnt/NAME of every worker; may be repeated"
    parser.add_argument("--disk", action="append", default=[], metavar="NAME", help=text)
    text = "system image of the workers (default: one for the slice)"
    parser.add_argument("--runtime", default="", metavar="NAME", help=text)
    text = "give the workers no addresses outside Google's network"
    parser.add_argument("--internal-ips", action="store_true", help=text)
    text = "only print the gcloud commands that do the same"
    parser.add_argument("--dry-run", action="store_true", help=text)


def add_disk_commands(group: "Commands") -> None:
    """Add `disk` and its commands."""
    summary = "manage data disks, which are filled once and mounted on every worker"
    disk_group = add_group(group, "disk", summary)
    add_google_location(add_command(disk_group, "ls", "list the disks that Headrace created", "tpu_disk"))
    create = add_disk_command(disk_group, "create", "create a data disk")
    create.add_argument("--size", type=int, required=True, metavar="GB", help="size in gigabytes")
    text = "type of the disk (default: one that the TPU accepts)"
    create.add_argument("--type", metavar="NAME", help=text)
    text = "type of the slice that will use it: v6e accepts other disks than v5e"
    create.add_argument("--slice", metavar="TYPE", help=text)
    summary = "attach a data disk to a slice, and mount it at /mnt/DISK"
    attach = add_disk_command(disk_group, "attach", summary)
    attach.add_argument("--to", required=True, metavar="NAME", help="name of the slice")
    text = "mount it writable, to fill it; for slices of one machine"
    attach.add_argument("--write", action="store_true", help=text)
    detach = add_disk_command(disk_group, "detach", "detach a data disk from a slice")
    detach.add_argument("--from", dest="to", required=True, metavar="NAME", help="name of the slice")
    delete = add_disk_command(disk_group, "delete", "delete a data disk and everything on it")
    delete.add_argument("--force", action="store_true", help="delete it even if it is not yours")


def add_disk_command(group: "Commands", name: str, summary: str) -> "Parser":
    """Add a command for one disk. The platform `local` has no disks."""
    parser = add_command(group, name, summary, "tpu_disk")
    parser.add_argument("disk", metavar="DISK", help="name of the disk")
    add_google_location(parser)
    parser.set_defaults(platform="gcp")
    return parser


def add_export_command(group: "Commands") -> None:
    """Add `export`."""
    summary = "write a job file for another scheduler: JobSet, SkyPilot or Slurm"
    parser = add_command(group, "export", summary, "tpu_export")
    add_recipe(parser)
    text = "scheduler to write for"
    parser.add_argument("--to", required=True, choices=["jobset", "skypilot", "slurm"], help=text)
    text = "TPU slice or GPUs to run on: v4-32, gpu:h200x16, ..."
    parser.add_argument("--slice", required=True, metavar="TYPE", help=text)
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: from the recipe)")
    text = "use spot capacity: cheaper, but may be taken away at any time"
    parser.add_argument("--spot", action="store_true", help=text)
    text = "time limit of a Slurm job in hours (default: 24)"
    parser.add_argument("--max-hours", type=float, metavar="N", help=text)
    text = "for jobset: container image with Headrace and the recipe in it"
    parser.add_argument("--image", default="", metavar="NAME", help=text)
    text = "system image of the TPU VMs (default: one for the slice)"
    parser.add_argument("--runtime", default="", metavar="NAME", help=text)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: standard output)")
