"""A pod on your laptop: slices whose workers are folders and processes of this machine. The same commands,
the same launcher; a slice is there at once and costs nothing."""

import contextlib
import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Any

from headrace.tpu import job_ledger as place, worker
from headrace.tpu.cloud import IDLE, LABEL, OWNER, SECONDS, Rented, State, user
from headrace.tpu.request import Request


class Local:
    name = scope = "local"  # no project has a name so short

    def __init__(self) -> None:
        self.root = place.home() / "local"

    def find(self, name: str, zone: str = "") -> Rented | None:
        return next((one for one in self.survey()[0] if one.name == name), None)

    def survey(self) -> tuple[list[Rented], dict[str, str]]:
        found = []
        for file in sorted(self.root.glob("*/slice.json")):
            with contextlib.suppress(OSError, ValueError):  # deleted meanwhile
                found.append(self.rented(file.parent, json.loads(file.read_text())))
        return found, {}

    def rented(self, folder: Path, told: dict[str, Any]) -> Rented:
        return Rented(
            name=folder.name,
            zone="local",
            accelerator=told["accelerator"],
            terms=told["terms"],
            state=State(told["state"]),
            said=told["state"].upper(),
            workers=tuple(str(folder / f"w{number}") for number in range(told["workers"])),
            created=told["created"],
            births=frozenset([told["created"]]),
            labels=told["labels"],
            slices=told["slices"],
        )

    def create(self, request: Request, zone: str, seconds: float, idle: float | None) -> None:
        folder = self.root / request.name
        for number in range(request.slice.hosts):
            (folder / f"w{number}").mkdir(parents=True, exist_ok=True)
        labels = {LABEL: "yes", OWNER: user(), SECONDS: str(int(seconds)), IDLE: str(int(idle or 0))}
        told: dict[str, Any] = dict(
            accelerator=request.accelerator, terms=request.terms, state="ready", labels=labels
        )
        told |= dict(
            slices=request.slice.slices, workers=request.slice.hosts, created=time.time(), port=free_port()
        )
        self.write(folder, told)

    def write(self, folder: Path, told: dict[str, Any]) -> None:
        new = folder / "slice.new"
        new.write_text(json.dumps(told))
        new.replace(folder / "slice.json")

    def extend(self, rented: Rented, seconds: float, idle: float | None) -> None:
        folder = self.root / rented.name
        told = json.loads((folder / "slice.json").read_text())
        told["labels"] |= {SECONDS: str(int(seconds)), IDLE: str(int(idle or 0))}
        self.write(folder, told)

    def delete(self, rented: Rented) -> None:
        """With whatever still runs there, and nothing else: a number may be another's since."""
        for job in (self.root / rented.name).glob("w*/.headrace/jobs/*/"):
            now = worker.state(job)
            if now["running"]:
                with contextlib.suppress(OSError):
                    os.killpg(os.getpgid(now["pid"]), signal.SIGKILL)
        shutil.rmtree(self.root / rented.name, ignore_errors=True)

    def coordinator(self, rented: Rented) -> str:
        return f"127.0.0.1:{json.loads((self.root / rented.name / 'slice.json').read_text())['port']}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
