"""The Python environment on every worker: the versions of constraints.txt, and the data disks.

An environment is stamped with a checksum of everything that decides its content, so that a worker that has it
is left alone."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from headrace.config.sections import TrainRecipe
from headrace.tpu.workers import Workers

PYTHON = "3.12"  # installed by uv; TPU VMs come with 3.10
DEFAULT_EXTRAS = ("tpu", "gcs")  # of pyproject.toml, for every job

# With --platform local the workers use the launcher's own Python (HEADRACE_WORKER_PYTHON).
INSTALL = """
set -eu
env="$HOME/.headrace/envs/{stamp}"
if [ ! -f "$env/ready" ]; then
  rm -rf "$env"
  if [ -n "${{HEADRACE_WORKER_PYTHON:-}}" ]; then
    mkdir -p "$env/bin"
    printf '#!/bin/sh\\nexec "%s" "$@"\\n' "$HEADRACE_WORKER_PYTHON" > "$env/bin/python"
    chmod +x "$env/bin/python"
  else
    export PATH="$HOME/.local/bin:$PATH"
    command -v uv > /dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh > /dev/null 2>&1
    cd "$HOME/.headrace/tree"
    mkdir -p "$env"
    grep -v '^libtpu==' constraints.txt > "$env.txt"
    uv venv --quiet --clear --python {python} "$env"
    uv pip install --quiet --python "$env/bin/python" --constraint "$env.txt" \\
      --requirement pyproject.toml {extras}
  fi
  touch "$env/ready"
fi
ln -sfn "$env" "$HOME/.headrace/env"
"""
MOUNT = """
set -eu
place=/mnt/{disk}
mountpoint -q "$place" && exit 0
ids=/dev/disk/by-id
for device in $ids/google-{disk} $ids/google-persistent-disk-{number} /dev/nvme0n{nvme}; do
  [ -e "$device" ] && break
done
sudo mkdir -p "$place"
if [ {mode} = rw ] && ! sudo blkid "$device" > /dev/null; then sudo mkfs.ext4 -q -m 0 "$device"; fi
sudo mount -o {options} "$device" "$place"
if [ {mode} = rw ]; then sudo chown "$(id -un)" "$place"; fi
"""
Mode = Literal["ro", "rw"]


def extras_for(cfg: TrainRecipe) -> list[str]:
    """The extras of pyproject.toml that this recipe needs on top of the default ones."""
    return ["wandb"] * cfg.log.wandb + ["torch"] * (cfg.model.use == "torch")


def environment_stamp(tree: Path, extras: Sequence[str] = ()) -> str:
    """Checksum of everything that decides what is installed from this working tree."""
    content = b"\0".join((tree / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    settings = " ".join((INSTALL, PYTHON, *DEFAULT_EXTRAS, *extras))
    return hashlib.sha256(content + settings.encode()).hexdigest()[:16]


def make_install_script(tree: Path, extras: Sequence[str] = ()) -> str:
    """Script that installs the environment. It skips the pin of libtpu, which is for `headrace plan`: JAX
    itself pins the version that it runs with."""
    options = " ".join(f"--extra {name}" for name in (*DEFAULT_EXTRAS, *extras))
    return INSTALL.format(stamp=environment_stamp(tree, extras), python=PYTHON, extras=options)


def install(workers: Workers, tree: Path, *, retry_seconds: float, extras: Sequence[str] = ()) -> None:
    """Install the environment of this working tree on all workers that lack it."""
    workers.run_on_all(make_install_script(tree, extras), retry_seconds=retry_seconds)


def mount(workers: Workers, disk: str, number: int, mode: Mode, *, retry_seconds: float) -> None:
    """Mount a data disk at /mnt/DISK on all workers. `number` counts the data disks of the slice from 1. With
    mode `rw` a disk without a file system is formatted."""
    workers.run_on_all(make_mount_script(disk, number, mode), retry_seconds=retry_seconds)


def make_mount_script(disk: str, number: int, mode: Mode) -> str:
    """Script that mounts a data disk, see `mount`."""
    assert re.fullmatch(r"[a-z][a-z0-9-]*", disk) and mode in ("ro", "rw")
    options = (
        "ro,noload" if mode == "ro" else "rw,discard"
    )  # noload: a read-only disk cannot replay its journal
    return MOUNT.format(disk=disk, number=number, nvme=number + 1, mode=mode, options=options)


def unmount(workers: Workers, disk: str) -> None:
    """Unmount a data disk on all workers. Does nothing where it is not mounted."""
    workers.run_on_all(f"sudo umount /mnt/{disk} 2> /dev/null || ! mountpoint -q /mnt/{disk}")
