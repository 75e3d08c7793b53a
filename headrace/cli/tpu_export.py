"""`headrace tpu export`: the same run, written for another scheduler."""

import argparse
import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.tpu import bundle, cost, install
from headrace.tpu.request import Request, check_name, name_from


def export(args: argparse.Namespace) -> None:
    from headrace.config import recipe
    from headrace.hardware import slices
    from headrace.tpu.schedulers import Exported

    cfg = recipe.load_train(args.recipe, args.overrides)
    where = slices.parse(args.slice)
    name = args.name or name_from(Path(args.recipe).stem)
    check_name(name)
    cost.check("--max-hours", args.max_hours)
    request = Request(name, where, (), runtime=args.runtime) if where.chip.is_tpu else None
    if args.to == "jobset" and not args.image:
        raise UserError("--image: found none, expected a container with Headrace and the recipe in it")
    if args.to in ("jobset", "skypilot"):
        lasting(args.to, cfg)
    file = Path(args.recipe).resolve()
    inside = within_tree(file)
    if args.to == "jobset" and not inside:
        print(f"warning: {file} is not in the tree: the image must have it there", file=sys.stderr)
    told = Exported(
        name=name,
        command=("headrace", "train", inside or str(file), *args.overrides),
        slice=where,
        spot=args.spot,
        hours=args.max_hours or cost.HOURS,
        image=args.image,
        accelerator=request.accelerator if request else "",
        runtime=request.image if request and (args.runtime or args.to == "skypilot") else "",
        extras=tuple(install.needed(cfg)),
        outside="" if inside else str(file),
    )
    text = importlib.import_module(f"headrace.tpu.schedulers.{args.to}").write(told)
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text)
        print(f"{args.out}: written")


def within_tree(file: Path) -> str:
    """Its path from the root of the clone, where jobs begin; nothing if it is elsewhere, or there is none."""
    with contextlib.suppress(UserError):
        if file.is_relative_to(bundle.root()):
            return str(file.relative_to(bundle.root()))
    return ""


def lasting(to: str, cfg: Any) -> None:
    """Machines of these come and go, with what is on them."""
    if "://" not in cfg.run:
        raise UserError(
            f"run: found {cfg.run}, expected run=gs://BUCKET/FOLDER: with --to {to} the checkpoints would go "
            "with the machine that wrote them"
        )
    if "://" not in cfg.data.path:
        words = (
            f"warning: data.path is {cfg.data.path}, which must be on every machine; or gs://BUCKET/FOLDER"
        )
        print(words, file=sys.stderr)
