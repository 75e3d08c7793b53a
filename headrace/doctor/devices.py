"""What JAX finds, asked in a process of its own: an accelerator that is broken or held by another may make it
hang or die. The same process says how large a checkpoint of the recipe is."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import recipe, sections
from headrace.storage import files as store
from headrace.doctor.report import Line
from headrace.doctor import machine as here
from headrace.doctor.gce import Instance
from headrace.trackers.terminal import size

WAIT = 120.0  # seconds: large slices take one of them


def check(
    cfg: sections.Run | None, path: str | None, overrides: Sequence[str], where: Instance | None
) -> list[Line]:
    command = [sys.executable, "-m", "headrace.doctor.devices", *([path, *overrides] if path else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    except subprocess.TimeoutExpired:
        fix = "end other processes that use the chips; on a slice, run this on all hosts at once"
        return [Line("fail", "devices", f"JAX did not find them within {WAIT:.0f} s", fix)]
    answer = done.stdout.strip().splitlines()[-1:] or [""]
    if done.returncode or not answer[0].startswith("{"):
        said = " ".join((done.stderr.strip().splitlines() or ["it said nothing"])[-1].split())[:300]
        return [Line("fail", "devices", f"JAX does not start: {said}", cure(said))]
    found = json.loads(answer[0])
    return [platform(found, where), *room(cfg, found.get("checkpoint"))]


def cure(said: str) -> str:
    if "already in use" in said:
        return "end the process that holds the chips (`sudo lsof /dev/accel0 /dev/vfio/0`)"
    return "look at `python -c 'import jax; jax.devices()'`"


def platform(found: dict[str, Any], where: Instance | None) -> Line:
    told = f"{found['count']} x {found['kind']}"
    if found["processes"] > 1:
        told += f", {found['local']} of them on this host of {found['processes']}"
    if found["platform"] != "cpu":
        return Line("ok", "devices", told)
    if has_tpu(where):
        return Line(
            "fail", "devices", "a TPU is here, and JAX does not see it", 'pip install "headrace[tpu]"'
        )
    if has_gpu():
        return Line(
            "fail", "devices", "a GPU is here, and JAX does not see it", 'pip install "headrace[gpu]"'
        )
    return Line("warn", "devices", f"{told}: no accelerator, so only small models train in reasonable time")


def has_tpu(where: Instance | None) -> bool:
    chips = any(Path("/dev").glob("accel[0-9]*"))
    return chips or (where is not None and where.kind.startswith(("v", "tpu", "ct")))


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and bool(here.gpus())


def room(cfg: sections.Run | None, checkpoint: int | None) -> list[Line]:
    """For a checkpoint beside the newest one, as a run asks for, and for as many as are kept, one from
    half-way and one that is being written."""
    if cfg is None:
        return []
    if checkpoint is None:
        return [Line("warn", "disk", "how much a checkpoint takes is not known until the data is there")]
    kept, told = checkpoint * (cfg.checkpoint.keep + 2), f"a checkpoint takes {size(checkpoint)}"
    beside = f"the {cfg.checkpoint.keep} that are kept, one from half-way and one being written"
    if store.is_url(cfg.run):
        return [Line("ok", "disk", f"{told}, {size(kept)} with {beside}")]
    free = shutil.disk_usage(here.existing(Path(cfg.run))).free
    said = f"{told}, and {size(free)} are free for {cfg.run}"
    if free < checkpoint:
        return [Line("fail", "disk", said, "make room, or put `run` on a larger disk")]
    if free < kept:
        fix = f"make room for {size(kept)} ({beside}), or keep fewer with checkpoint.keep"
        return [Line("warn", "disk", said, fix)]
    return [Line("ok", "disk", said)]


def main() -> None:
    cfg = recipe.load_train(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else None
    import jax

    found: dict[str, Any] = {
        "platform": jax.default_backend(),
        "kind": jax.devices()[0].device_kind,
        "count": jax.device_count(),
        "local": jax.local_device_count(),
        "processes": jax.process_count(),
    }
    if cfg is not None:
        found["checkpoint"] = checkpoint_bytes(cfg)
    print(json.dumps(found))


def checkpoint_bytes(cfg: sections.Run) -> int | None:
    """None where the model's size is not known yet: no vocabulary, or a module of torch."""
    from headrace.nn import sharding as mesh
    from headrace.data.memory_map import open_folder, read_index
    from headrace.plan import estimate as arithmetic

    try:
        if not cfg.model.vocab:
            vocab = read_index(open_folder(cfg.data.path)).vocab
            cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab=vocab))
        whole = arithmetic.held(cfg, dict.fromkeys(mesh.AXES, 1))
    except Exception:  # whatever is wrong with the data is another check's to tell
        return None
    return whole.weights + whole.optimizer


if __name__ == "__main__":
    main()
