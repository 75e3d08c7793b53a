"""Record guards anew: `python -m tests.golden.record fingerprints|losses|snapshots|data|runs`, on a CPU.

`data` and `runs` were made once: the stored runs show that run folders written earlier can be resumed."""

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support import xla_flags

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags.flags(8)

import jax

from headrace.config import recipe
from headrace.data.pipeline.prepare import prepare
from tests.golden.cases import CASES, MESHES, TINY
from tests.golden.losses import HERE, losses, machine
from tests.golden.programs import fingerprints
from tests.golden.runs import RUNS, resume, start
from tests.golden.snapshots import all_help, recipe_schema, run_folder

WORDS = [
    *("the", "mill", "wheel", "turns", "water", "grain", "stone", "river", "flows", "over"),
    *("a", "dam", "and", "grinds", "fine", "white", "flour", "for", "bread"),
]


def record_fingerprints() -> None:
    path = HERE / "fingerprints.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    recorded[jax.__version__] = {
        f"{name}, {mesh}": fingerprints(case, *MESHES[mesh])
        for name, case in CASES.items()
        for mesh in MESHES
    }
    path.write_text(json.dumps(recorded, indent=1) + "\n")


def record_losses(scratch: Path) -> None:
    recorded = {path.stem: [loss.hex() for loss in losses(path, scratch / path.stem)] for path in TINY}
    content = {"machine": machine(), "losses": recorded}
    (HERE / "losses.json").write_text(json.dumps(content, indent=1) + "\n")


def record_data(scratch: Path) -> None:
    """Pack random sentences, from documents shorter and longer than a row."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(3, 120))) + "." for _ in range(700)]
    (scratch / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (scratch / "data.yaml").write_text(
        f"path: data\nsources: {{texts: {{path: {scratch}/texts.jsonl}}}}\n"
        "tokenizer: {use: bpe, vocab: 300}\npack: {sequence_length: 64, eval_fraction: 0.05}\n"
    )
    os.chdir(scratch)
    prepare(recipe.load_data(scratch / "data.yaml"), print)
    shutil.rmtree(HERE / "data", ignore_errors=True)
    unused = shutil.ignore_patterns(".lock", "report.html", "stages.json", "normalized")
    shutil.copytree(scratch / "data", HERE / "data", ignore=unused)


def record_runs(scratch: Path) -> None:
    """Train each run, and keep its folder as it was in the middle, with the losses of all steps."""
    losses = {run.name: [loss.hex() for loss in start(run, scratch)] for run in RUNS}
    shutil.rmtree(HERE / "runs", ignore_errors=True)
    shutil.copytree(scratch / "runs", HERE / "runs", ignore=shutil.ignore_patterns(".lock"))
    (HERE / "runs.json").write_text(json.dumps({"machine": machine(), "losses": losses}, indent=1) + "\n")


def record_snapshots(scratch: Path) -> None:
    (HERE / "snapshots").mkdir(exist_ok=True)
    (HERE / "snapshots" / "help.txt").write_text(all_help())
    (HERE / "snapshots" / "schema.json").write_text(recipe_schema())
    for name in ("data", "runs"):
        shutil.copytree(HERE / name, scratch / name, dirs_exist_ok=True)
    resume(RUNS[0], scratch)
    (HERE / "snapshots" / "run-folder.txt").write_text(run_folder(scratch / "runs" / RUNS[0].name))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        record: dict[str, Callable[[], None]] = {
            "fingerprints": record_fingerprints,
            "losses": lambda: record_losses(scratch / "losses"),
            "snapshots": lambda: record_snapshots(scratch),
            "data": lambda: record_data(scratch),
            "runs": lambda: record_runs(scratch),
        }
        for what in sys.argv[1:]:
            record[what]()
