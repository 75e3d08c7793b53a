"""This machine: versions that fit each other, GPU driver, limits, ports, and room in the folders of a run."""

import contextlib
import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from headrace.config import sections
from headrace.storage import files as store
from headrace.doctor.report import Line, State
from headrace.errors import UserError
from headrace.trackers.terminal import size

NEWEST_CUDA = {"jax-cuda13-plugin": Version("580"), "jax-cuda12-plugin": Version("525")}  # oldest drivers
PORT = 8476  # JAX's, where nothing else is said
FILES = 4096  # that a run with many shards and connections may have open
SHARED = 1 << 30  # bytes of /dev/shm that libraries of collectives like to have


def versions() -> list[Line]:
    """Whether what is installed is what Headrace and JAX ask for."""
    found = {name: version_of(name) for name in ("jax", "jaxlib", "libtpu", *NEWEST_CUDA)}
    if found["jax"] is None:
        return [
            Line("fail", "versions", "JAX is not installed", 'pip install "headrace[tpu]" or "headrace[gpu]"')
        ]
    lines = []
    if found["jaxlib"] != found["jax"]:
        said = f"jax {found['jax']} with jaxlib {found['jaxlib']}"
        lines.append(
            Line("fail", "versions", said, f"pip install jax=={found['jax']} jaxlib=={found['jax']}")
        )
    for name in ("libtpu", *NEWEST_CUDA):
        lines += misfit(name, found[name])
    for text in metadata.requires("headrace") or [] if version_of("headrace") else []:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            lines += misfit(wanted.name, version_of(wanted.name), wanted)
    told = [f"python {'.'.join(map(str, sys.version_info[:3]))}"]
    told += [f"{name} {version}" for name, version in found.items() if version is not None]
    return lines or [Line("ok", "versions", ", ".join(told))]


def misfit(name: str, version: str | None, wanted: Requirement | None = None) -> list[Line]:
    """A line if a package is not what is asked for: by Headrace, or for accelerators by JAX."""
    of = "headrace" if wanted is not None else f"jax {version_of('jax')}"
    if wanted is None:
        asked = [Requirement(text) for text in metadata.requires("jax") or []]
        wanted = next((one for one in asked if one.name == name), None)
        if wanted is None or version is None:
            return []
    if version is not None and wanted.specifier.contains(version, prereleases=True):
        return []
    found = f"{name} {version}" if version is not None else f"no {name}"
    asked_for = f"{name}{wanted.specifier}"
    state: State = "warn" if name == "libtpu" else "fail"  # others often work
    return [
        Line(state, "versions", f"{found}, and {of} is made for {asked_for}", f'pip install "{asked_for}"')
    ]


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[tuple[str, str, str]]:
    """Name, memory and driver of each GPU of NVIDIA's."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise UserError((done.stdout + done.stderr).strip() or f"nvidia-smi ended with {done.returncode}")
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [(name, memory, driver) for name, memory, driver in rows]


def driver() -> list[Line]:
    try:
        found = gpus()
    except (UserError, subprocess.TimeoutExpired) as error:
        fix = "load or install NVIDIA's driver, and look at `dmesg`"
        return [Line("fail", "driver", f"nvidia-smi does not work: {error}", fix)]
    if not found:
        return []
    version = found[0][2]
    for plugin, oldest in NEWEST_CUDA.items():
        if version_of(plugin) is not None and Version(version) < oldest:
            said = f"driver {version}, and {plugin} needs {oldest} or newer"
            return [Line("fail", "driver", said, f"install driver {oldest} or newer")]
    kinds = {name: sum(other == name for other, _, _ in found) for name, _, _ in found}
    told = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    return [Line("ok", "driver", f"{version} for {told} ({found[0][1]} each)")]


def limits() -> list[Line]:
    lines = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES:
        fix = f"ulimit -n {hard if 0 < hard < 65536 else 65536}"
        lines.append(Line("warn", "limits", f"at most {soft} open files, and {FILES} may be needed", fix))
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < SHARED:
        said = f"{size(shutil.disk_usage(shared).free)} free in /dev/shm"
        fix = "mount it larger; in a container, docker run --shm-size=8g"
        lines.append(Line("warn", "limits", said, fix))
    return lines or [Line("ok", "limits", f"{soft:,} open files")]


def ports() -> list[Line]:
    """The one at which the first host waits for the others."""
    address, process = os.environ.get("HEADRACE_COORDINATOR", ""), os.environ.get("HEADRACE_PROCESS", "0")
    host, _, text = address.rpartition(":")
    if address and not (host and text.isdigit()):
        fix = "HEADRACE_COORDINATOR=10.0.0.1:8476"
        return [Line("fail", "ports", f"found {address}, expected an address and a port", fix)]
    port = int(text or PORT)
    if process != "0":
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:
            fix = "name the first host by an address that the others reach"
            return [
                Line("fail", "ports", f"{host}, the first host, is not known here: {error.strerror}", fix)
            ]
        return [Line("ok", "ports", f"{address}, the first host, is known here")]
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("", port))
        except OSError as error:
            state: State = "fail" if address else "warn"  # alone, a host needs none
            fix = f"end what uses it (`ss -ltnp 'sport = :{port}'`), or set HEADRACE_COORDINATOR to another"
            return [Line(state, "ports", f"{port}, where other hosts come: {error.strerror}", fix)]
    return [Line("ok", "ports", f"{port} is free for the other hosts")]


def storage(cfg: sections.Run | None) -> list[Line]:
    """Whether the run folder can be written, the data read, and the cache has room."""
    if cfg is None:
        free = shutil.disk_usage(".").free
        return [Line("ok", "disk", f"{size(free)} free here; a recipe would say how much a checkpoint takes")]
    lines = [writable(cfg.run), readable(cfg.data.path)]
    if store.is_url(cfg.data.path) or store.is_url(cfg.run):
        cache = os.environ.get("HEADRACE_CACHE") or str(Path.home() / ".cache/headrace")
        place = existing(Path(cache))
        free, fix = shutil.disk_usage(place).free, "name another folder with HEADRACE_CACHE"
        if not os.access(place, os.W_OK):
            lines.append(Line("fail", "cache", f"{cache} may not be written", fix))
        else:
            state: State = "warn" if free < 10e9 else "ok"
            lines.append(
                Line(state, "cache", f"{size(free)} free in {cache}", fix if state == "warn" else "")
            )
    return lines


def writable(run: str) -> Line:
    said = f"{store.shown(run)} can be written"
    if store.is_url(run):
        if not run.startswith("gs://"):
            return Line("fail", "run", f"found {store.shown(run)}", "a local folder or gs://BUCKET/FOLDER")
        try:
            url = store.join(run, f".doctor-{uuid.uuid4().hex}")
            generation = store.swap(url, url.encode(), 0)
            store.drop(url, generation or 0)
        except UserError as error:
            fix = "roles/storage.objectUser for this account: gcloud storage buckets add-iam-policy-binding"
            return Line("fail", "run", str(error), "" if "there is no bucket" in str(error) else fix)
        return Line("ok", "run", said)
    place = existing(Path(run))
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
    except OSError as error:
        full = error.errno == errno.ENOSPC
        fix = "make room" if full else f"chown or chmod {place}, or set `run` to another folder"
        return Line("fail", "run", f"{place}: {error.strerror}", fix)
    return Line("ok", "run", said)


def readable(data: str) -> Line:
    from headrace.data.memory_map import open_folder, read_index

    try:
        index = read_index(open_folder(data))
    except (UserError, OSError) as error:
        return Line(
            "fail", "data", str(error), "" if "headrace data prepare" in str(error) else "see docs/data.md"
        )
    rows = index.splits["train"].rows
    return Line("ok", "data", f"{store.shown(data)}: {rows:,} rows of {index.sequence_length:,} tokens")


def existing(path: Path) -> Path:
    """A folder, or what is there above it."""
    path = path.absolute()
    with contextlib.suppress(PermissionError):
        while not path.exists():
            path = path.parent
    return path
