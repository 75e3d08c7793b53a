"""Slices whose workers are folders and processes of this machine, for trying out all of `headrace tpu`
without a cloud. A slice is ready at once and costs nothing."""

import contextlib
import json
import os
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

from headrace.tpu import clock, job_ledger, worker
from headrace.tpu.cloud import (
    MANAGED_LABEL,
    OWNER_LABEL,
    Slice,
    SliceState,
    current_user_label,
    limit_labels,
)
from headrace.tpu.request import Request


class Local:
    """The `Cloud` of this machine. Each slice is a folder with its description in slice.json."""

    name = scope = "local"  # project names have at least six characters, so none is the same

    def __init__(self) -> None:
        self.root = job_ledger.state_dir() / "local"

    def find(self, name: str, zone: str = "") -> Slice | None:
        """Look up a slice by name."""
        return next((slice_ for slice_ in self.list_slices()[0] if slice_.name == name), None)

    def list_slices(self) -> tuple[list[Slice], dict[str, str]]:
        """List all slices. There are no zones that could fail to answer."""
        slices = []
        for file in sorted(self.root.glob("*/slice.json")):
            with contextlib.suppress(OSError, ValueError):  # deleted in the meantime
                slices.append(to_slice(file.parent, json.loads(file.read_text())))
        return slices, {}

    def create(self, request: Request, zone: str, time_limit: float, idle_limit: float | None) -> None:
        """Make the folders of a slice."""
        folder = self.root / request.name
        for number in range(request.slice.hosts):
            (folder / f"w{number}").mkdir(parents=True, exist_ok=True)
        labels = {MANAGED_LABEL: "yes", OWNER_LABEL: current_user_label()}
        description = dict(
            accelerator=request.accelerator,
            terms=request.terms,
            state="ready",
            labels=labels | limit_labels(time_limit, idle_limit),
            slices=request.slice.slices,
            workers=request.slice.hosts,
            created=clock.now(),
            port=find_free_port(),
        )
        self.write(folder, description)

    def write(self, folder: Path, description: dict[str, Any]) -> None:
        """Write the description of a slice so that a reader sees all of it or the previous one."""
        new = folder / "slice.new"
        new.write_text(json.dumps(description))
        new.replace(folder / "slice.json")

    def set_timer(self, slice_: Slice, time_limit: float, idle_limit: float | None) -> None:
        """Change the labels of a slice. Nothing acts on them."""
        folder = self.root / slice_.name
        description = json.loads((folder / "slice.json").read_text())
        description["labels"] |= limit_labels(time_limit, idle_limit)
        self.write(folder, description)

    def delete(self, slice_: Slice) -> None:
        """Kill the trainers of a slice and delete its folders. A process number that now belongs to another
        process is left alone."""
        for job in (self.root / slice_.name).glob("w*/.headrace/jobs/*/"):
            state = worker.read_state(job)
            if state["running"] and state["pid"] is not None:
                with contextlib.suppress(OSError):
                    os.killpg(os.getpgid(state["pid"]), signal.SIGKILL)
        shutil.rmtree(self.root / slice_.name, ignore_errors=True)

    def coordinator(self, slice_: Slice) -> str:
        """Address at which the trainers of a slice meet."""
        description = json.loads((self.root / slice_.name / "slice.json").read_text())
        return f"127.0.0.1:{description['port']}"


def to_slice(folder: Path, description: dict[str, Any]) -> Slice:
    """The slice in a folder, from the content of slice.json."""
    return Slice(
        name=folder.name,
        zone="local",
        accelerator=description["accelerator"],
        terms=description["terms"],
        state=SliceState(description["state"]),
        status_text=description["state"].upper(),
        workers=tuple(str(folder / f"w{number}") for number in range(description["workers"])),
        created_at=description["created"],
        node_creation_times=frozenset([description["created"]]),
        labels=description["labels"],
        slices=description["slices"],
    )


def find_free_port() -> int:
    """A port of this machine that no process uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
