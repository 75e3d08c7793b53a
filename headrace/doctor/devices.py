"""The devices that JAX finds, and room on the disk for checkpoints.

JAX starts in a process of its own: an accelerator that is broken, or used by another process, may make it
hang or crash. That process also computes the size of a checkpoint of the recipe."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from headrace.config import recipe, sections
from headrace.doctor import machine
from headrace.doctor.gce import Instance
from headrace.doctor.report import CheckResult
from headrace.storage import files
from headrace.trackers.terminal import format_bytes

TIMEOUT = 120.0  # seconds; large slices take up to a minute


class DeviceInfo(TypedDict, total=False):
    """The JSON that the other process prints."""

    platform: str
    kind: str
    count: int
    local: int  # devices of this host
    processes: int
    checkpoint: int | None  # bytes; None if not known yet


def check_devices(
    cfg: sections.TrainRecipe | None, path: str | None, overrides: Sequence[str], instance: Instance | None
) -> list[CheckResult]:
    """Check that JAX finds the devices of this machine, and that checkpoints fit on the disk."""
    command = [sys.executable, "-m", "headrace.doctor.devices", *([path, *overrides] if path else [])]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        fix = "stop other processes that use the chips; on a slice, run this on all hosts at the same time"
        return [CheckResult("fail", "devices", f"JAX did not find them within {TIMEOUT:.0f} s", fix)]
    last_line = (result.stdout.strip().splitlines() or [""])[-1]
    if result.returncode or not last_line.startswith("{"):
        error_lines = result.stderr.strip().splitlines() or ["no error message"]
        error_text = " ".join(error_lines[-1].split())[:300]
        return [CheckResult("fail", "devices", f"JAX does not start: {error_text}", suggest_fix(error_text))]
    info: DeviceInfo = json.loads(last_line)
    return [check_platform(info, instance), *check_disk(cfg, info.get("checkpoint"))]


def suggest_fix(error_text: str) -> str:
    """The command that shows or fixes why JAX does not start."""
    if "already in use" in error_text:
        return "end the process that uses the chips (`sudo lsof /dev/accel0 /dev/vfio/0`)"
    return "run `python -c 'import jax; jax.devices()'`"


def check_platform(info: DeviceInfo, instance: Instance | None) -> CheckResult:
    """Check that JAX uses the accelerator of this machine and not its CPU."""
    found = f"{info['count']} x {info['kind']}"
    if info["processes"] > 1:
        found += f", {info['local']} of them on this host of {info['processes']}"
    if info["platform"] != "cpu":
        return CheckResult("ok", "devices", found)
    for name, is_present, extra in (("TPU", has_tpu(instance), "tpu"), ("GPU", has_gpu(), "gpu")):
        if is_present:
            message = f"this machine has a {name}, but JAX does not see it"
            return CheckResult("fail", "devices", message, f'pip install "headrace[{extra}]"')
    message = f"{found}: no accelerator, so only small models train in reasonable time"
    return CheckResult("warn", "devices", message)


def has_tpu(instance: Instance | None) -> bool:
    """Whether this machine has TPU chips, by its devices or its metadata."""
    has_device = any(Path("/dev").glob("accel[0-9]*"))
    return has_device or (instance is not None and instance.accelerator.startswith(("v", "tpu", "ct")))


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU."""
    return shutil.which("nvidia-smi") is not None and bool(machine.list_gpus())


def check_disk(cfg: sections.TrainRecipe | None, checkpoint_bytes: int | None) -> list[CheckResult]:
    """Check that the run folder has room for the checkpoints that are kept, one from the middle of the run
    and one that is being written."""
    if cfg is None:
        return []
    if checkpoint_bytes is None:
        message = "the size of a checkpoint is not known until the data is prepared"
        return [CheckResult("warn", "disk", message)]
    total = checkpoint_bytes * (cfg.checkpoint.keep + 2)
    required = f"a checkpoint takes {format_bytes(checkpoint_bytes)}"
    scope = f"the {cfg.checkpoint.keep} that are kept, one from the middle of the run and one being written"
    if files.is_url(cfg.run_dir):
        return [CheckResult("ok", "disk", f"{required}, {format_bytes(total)} with {scope}")]
    free = shutil.disk_usage(machine.nearest_existing(Path(cfg.run_dir))).free
    message = f"{required}, and {format_bytes(free)} are free for {cfg.run_dir}"
    if free < checkpoint_bytes:
        return [CheckResult("fail", "disk", message, "make room, or put `run_dir` on a larger disk")]
    if free < total:
        fix = f"make room for {format_bytes(total)} ({scope}), or keep fewer with checkpoint.keep"
        return [CheckResult("warn", "disk", message, fix)]
    return [CheckResult("ok", "disk", message)]


def main() -> None:
    """Print the devices, and the size of a checkpoint of the recipe on the command line, as JSON."""
    cfg = recipe.load_train(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else None
    import jax

    info = DeviceInfo(
        platform=jax.default_backend(),
        kind=jax.devices()[0].device_kind,
        count=jax.device_count(),
        local=jax.local_device_count(),
        processes=jax.process_count(),
    )
    if cfg is not None:
        info["checkpoint"] = estimate_checkpoint_bytes(cfg)
    print(json.dumps(info))


def estimate_checkpoint_bytes(cfg: sections.TrainRecipe) -> int | None:
    """The size of a checkpoint. None if the size of the model is not known: without a vocabulary, or for a
    torch module."""
    from headrace.data.memory_map import open_folder, read_index
    from headrace.nn import sharding
    from headrace.plan.device_memory import count_state_bytes

    try:
        if not cfg.model.vocab:
            vocab = read_index(open_folder(cfg.data.path)).vocab
            cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, vocab=vocab))
        state = count_state_bytes(cfg, dict.fromkeys(sharding.AXES, 1))
    except Exception:  # another check reports what is wrong with the data
        return None
    return int(state.weights + state.optimizer)


if __name__ == "__main__":
    main()
