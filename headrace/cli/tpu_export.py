"""`headrace tpu export`: write the same run for another scheduler."""

import argparse
import contextlib
import importlib
import sys
from pathlib import Path

from headrace.config.sections import TrainRecipe
from headrace.errors import UserError
from headrace.tpu import bundle, cost, install
from headrace.tpu.request import Request, check_new_name, make_slice_name


def export(args: argparse.Namespace) -> None:
    """Write the file of a job for the scheduler of --to."""
    from headrace.config import recipe
    from headrace.hardware import slices
    from headrace.tpu.schedulers import ExportedJob

    cfg = recipe.load_train(args.recipe, args.overrides)
    shape = slices.parse_slice(args.slice)
    name = args.name or make_slice_name(Path(args.recipe).stem)
    check_new_name(name)
    cost.check_positive("--max-hours", args.max_hours)
    request = Request(name, shape, (), runtime=args.runtime) if shape.chip.is_tpu else None
    if args.to == "jobset" and not args.image:
        raise UserError("--image: found none, expected a container with Headrace and the recipe in it")
    if args.to in ("jobset", "skypilot"):
        check_durable_paths(args.to, cfg)
    file = Path(args.recipe).resolve()
    path_in_tree = relative_to_repository(file)
    if args.to == "jobset" and not path_in_tree:
        print(f"warning: {file} is not in the working tree: the image must have it there", file=sys.stderr)
    job = ExportedJob(
        name=name,
        command=("headrace", "train", path_in_tree or str(file), *args.overrides),
        slice=shape,
        spot=args.spot,
        hours=args.max_hours or cost.DEFAULT_HOURS,
        image=args.image,
        accelerator=request.accelerator if request else "",
        runtime=request.image if request and (args.runtime or args.to == "skypilot") else "",
        extras=tuple(install.extras_for(cfg)),
        outside_recipe="" if path_in_tree else str(file),
    )
    text = importlib.import_module(f"headrace.tpu.schedulers.{args.to}").render(job)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
        print(f"{args.out}: written")


def relative_to_repository(file: Path) -> str:
    """The path of a file from the root of the clone, where jobs start; empty if it is outside, or if Headrace
    does not run from a clone."""
    with contextlib.suppress(UserError):
        if file.is_relative_to(bundle.find_repository()):
            return str(file.relative_to(bundle.find_repository()))
    return ""


def check_durable_paths(scheduler: str, cfg: TrainRecipe) -> None:
    """Raise UserError for a local run folder, and warn about local data: machines of this scheduler come and
    go with their disks."""
    if "://" not in cfg.run_dir:
        raise UserError(
            f"run_dir: found {cfg.run_dir}, expected run_dir=gs://BUCKET/FOLDER: with --to {scheduler} the "
            "checkpoints would be lost with the machine that wrote them"
        )
    if "://" not in cfg.data.path:
        warning = f"warning: data.path is {cfg.data.path}, which must be on every machine; or use"
        print(f"{warning} gs://BUCKET/FOLDER", file=sys.stderr)
