"""`headrace report RUN`: the page, and samples for it on wish."""

import contextlib
import json
from pathlib import Path

from headrace.storage import files as store
from headrace.report import facts, run_page as page

TOKENS = 120  # of a sample


def write(run: str, out: Path | None) -> str:
    """Returns where the page is now. Whole or not at all: a browser may be looking at the last one."""
    path = store.join(run, "report.html") if out is None else str(out)
    store.write(path, page.made(facts.read(run)))
    return path


def sample(run: str, count: int) -> None:
    """Has the newest checkpoint write texts, and keeps them in the run folder."""
    from headrace.inference import sampling as draw, generate
    from headrace.checkpoint import open_run as folder
    from headrace.config import recipe

    opened = folder.open_run(recipe.load_run(run))
    path, told = store.join(run, "samples.jsonl"), b""
    with contextlib.suppress(FileNotFoundError):
        told = store.read(path)
    for seed in range(count):
        sampling = draw.Sampling(0.8, 50, 1.0, seed)
        text = "".join(generate.generate(opened, "", TOKENS, sampling))
        told += json.dumps({"step": opened.step, "seed": seed, "text": text}).encode() + b"\n"
    store.write(path, told)
