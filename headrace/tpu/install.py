"""The exact environment on every worker: the versions of constraints.txt, stamped by what they are, so that
a worker that has them is left alone."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.tpu.workers import Workers

PYTHON = "3.12"  # TPU VMs come with 3.10; uv brings this one
EXTRAS = ("tpu", "gcs")  # of pyproject.toml, for every job

# On this machine the worker's Python is the launcher's.
SCRIPT = """
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


def needed(cfg: Any) -> list[str]:
    """Extras of pyproject.toml that not every job needs."""
    return ["wandb"] * cfg.log.wandb + ["torch"] * (cfg.model.use == "torch")


def stamp(tree: Path, more: Sequence[str] = ()) -> str:
    """Of everything that decides what is installed; `more` are extras that a job needs besides."""
    content = b"\0".join((tree / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    told = " ".join((SCRIPT, PYTHON, *EXTRAS, *more))
    return hashlib.sha256(content + told.encode()).hexdigest()[:16]


def script(tree: Path, more: Sequence[str] = ()) -> str:
    """The pin of libtpu is left out: it is the planner's, and JAX says itself which one it runs with."""
    extras = " ".join(f"--extra {name}" for name in (*EXTRAS, *more))
    return SCRIPT.format(stamp=stamp(tree, more), python=PYTHON, extras=extras)


def install(workers: Workers, tree: Path, patience: float, more: Sequence[str] = ()) -> None:
    workers.each(script(tree, more), b"", patience)


MOUNT = """
set -eu
place=/mnt/{disk}
mountpoint -q "$place" && exit 0
ids=/dev/disk/by-id
for device in $ids/google-{disk} $ids/google-persistent-disk-{number} /dev/nvme0n{after}; do
  [ -e "$device" ] && break
done
sudo mkdir -p "$place"
if [ {mode} = rw ] && ! sudo blkid "$device" > /dev/null; then sudo mkfs.ext4 -q -m 0 "$device"; fi
sudo mount -o {options} "$device" "$place"
if [ {mode} = rw ]; then sudo chown "$(id -un)" "$place"; fi
"""


def mount(workers: Workers, disk: str, number: int, mode: str, patience: float) -> None:
    """The data disk of that number at /mnt/DISK. One that is new is formatted where it may be written."""
    workers.each(mounting(disk, number, mode), b"", patience)


def mounting(disk: str, number: int, mode: str) -> str:
    assert re.fullmatch(r"[a-z][a-z0-9-]*", disk) and mode in ("ro", "rw")
    options = "ro,noload" if mode == "ro" else "rw,discard"  # noload: no journal on what nobody may write
    return MOUNT.format(disk=disk, number=number, after=number + 1, mode=mode, options=options)


def unmount(workers: Workers, disk: str) -> None:
    workers.each(f"sudo umount /mnt/{disk} 2> /dev/null || ! mountpoint -q /mnt/{disk}")
