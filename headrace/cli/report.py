"""`headrace report`: the HTML page about a run, and samples for it."""

import argparse
import contextlib
import json
import os
from pathlib import Path

from headrace import api
from headrace.errors import UserError
from headrace.report import facts, run_page
from headrace.storage import files

SAMPLE_TOKENS = 120


def write_report(args: argparse.Namespace) -> None:
    """Write the page, after generating samples if they are asked for, and print its path."""
    if args.samples is not None and args.samples < 1:
        raise UserError(f"--samples: found {args.samples}, expected 1 or more")
    if args.out is not None and args.out.is_dir():
        raise UserError(f"--out: found a folder, {args.out}, expected a file")
    if args.samples is not None:
        os.environ.setdefault(
            "JAX_PLATFORMS", "cpu"
        )  # leaves accelerators to training; before JAX is imported
        write_samples(args.run, args.samples)
    print(write_page(args.run, args.out))


def write_page(run_dir: str, out: Path | None) -> str:
    """Write the page to `out`, by default RUN/report.html, and return its path.

    The file is replaced as a whole: a browser may be reading the previous one."""
    path = files.join(run_dir, "report.html") if out is None else str(out)
    files.write(path, run_page.render(facts.read_facts(run_dir)))
    return path


def write_samples(run_dir: str, count: int) -> None:
    """Generate `count` texts with the newest checkpoint and append them to RUN/samples.jsonl."""
    run = api.open_run(run_dir)
    path, lines = files.join(run_dir, "samples.jsonl"), b""
    with contextlib.suppress(FileNotFoundError):
        lines = files.read(path)
    for seed in range(count):
        text = "".join(api.generate(run, tokens=SAMPLE_TOKENS, seed=seed))
        lines += json.dumps({"step": run.step, "seed": seed, "text": text}).encode() + b"\n"
    files.write(path, lines)
