"""`headrace report RUN`: the HTML page about a run, and samples for it."""

import contextlib
import json
from pathlib import Path

from headrace.report import facts, run_page
from headrace.storage import files

SAMPLE_TOKENS = 120


def write_page(run_dir: str, out: Path | None) -> str:
    """Write the page to `out`, by default RUN/report.html, and return its path.

    The file is replaced as a whole: a browser may be reading the previous one."""
    path = files.join(run_dir, "report.html") if out is None else str(out)
    files.write(path, run_page.render(facts.read_facts(run_dir)))
    return path


def write_samples(run_dir: str, count: int) -> None:
    """Generate `count` texts with the newest checkpoint and append them to RUN/samples.jsonl."""
    from headrace.checkpoint.open_run import open_run
    from headrace.config.recipe import load_run
    from headrace.inference.generate import generate
    from headrace.inference.sampling import Sampling

    run = open_run(load_run(run_dir))
    path, lines = files.join(run_dir, "samples.jsonl"), b""
    with contextlib.suppress(FileNotFoundError):
        lines = files.read(path)
    for seed in range(count):
        sampling = Sampling(temperature=0.8, top_k=50, top_p=1.0, seed=seed)
        text = "".join(generate(run, "", SAMPLE_TOKENS, sampling))
        lines += json.dumps({"step": run.step, "seed": seed, "text": text}).encode() + b"\n"
    files.write(path, lines)
