"""This machine: package versions, GPU driver, limits, ports, and the folders of a run."""

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
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from headrace.config import sections
from headrace.doctor.report import CheckResult, State
from headrace.errors import UserError
from headrace.storage import files
from headrace.trackers.terminal import format_bytes

OLDEST_DRIVERS = {"jax-cuda13-plugin": Version("580"), "jax-cuda12-plugin": Version("525")}
DEFAULT_PORT = 8476  # JAX's own
OPEN_FILES = 4096  # that a run with many shards and connections may need
SHARED_MEMORY = 1 << 30  # bytes in /dev/shm that libraries of collectives may need
CACHE_BYTES = 10e9  # free space below which the cache gets a warning


class Gpu(NamedTuple):
    """One GPU, as nvidia-smi describes it."""

    name: str
    memory: str
    driver: str


def check_versions() -> list[CheckResult]:
    """Check that the installed packages are those that Headrace and JAX require."""
    installed = {name: find_version(name) for name in ("jax", "jaxlib", "libtpu", *OLDEST_DRIVERS)}
    jax, jaxlib = installed["jax"], installed["jaxlib"]
    if jax is None:
        fix = 'pip install "headrace[tpu]" or "headrace[gpu]"'
        return [CheckResult("fail", "versions", "JAX is not installed", fix)]
    results = []
    if jaxlib != jax:
        message = f"jax {jax} with jaxlib {jaxlib}"
        results.append(CheckResult("fail", "versions", message, f"pip install jax=={jax} jaxlib=={jax}"))
    for name in ("libtpu", *OLDEST_DRIVERS):
        results += check_required_by_jax(name, installed[name])
    if find_version("headrace"):
        for text in metadata.requires("headrace") or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                results += check_requirement(requirement, find_version(requirement.name), "headrace")
    names = [f"python {'.'.join(map(str, sys.version_info[:3]))}"]
    names += [f"{name} {version}" for name, version in installed.items() if version is not None]
    return results or [CheckResult("ok", "versions", ", ".join(names))]


def check_required_by_jax(name: str, version: str | None) -> list[CheckResult]:
    """Check a package for an accelerator against the requirements of JAX. Nothing is wrong if it is not
    installed."""
    requirements = [Requirement(text) for text in metadata.requires("jax") or []]
    requirement = next((entry for entry in requirements if entry.name == name), None)
    if requirement is None or version is None:
        return []
    return check_requirement(requirement, version, f"jax {find_version('jax')}")


def check_requirement(requirement: Requirement, version: str | None, required_by: str) -> list[CheckResult]:
    """Check that the installed `version` of a package (None: missing) meets a requirement. No result if it
    does."""
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return []
    name = requirement.name
    found = f"{name} {version}" if version is not None else f"no {name}"
    expected = f"{name}{requirement.specifier}"
    state: State = "warn" if name == "libtpu" else "fail"  # other versions of libtpu often work
    message = f"found {found}, but {required_by} requires {expected}"
    return [CheckResult(state, "versions", message, f'pip install "{expected}"')]


def find_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def list_gpus() -> list[Gpu]:
    """The NVIDIA GPUs of this machine. Raises UserError if nvidia-smi fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if result.returncode:
        output = (result.stdout + result.stderr).strip()
        raise UserError(output or f"nvidia-smi ended with exit code {result.returncode}")
    return [Gpu(*(cell.strip() for cell in line.split(","))) for line in result.stdout.splitlines()]


def check_driver() -> list[CheckResult]:
    """Check that the GPU driver works and is new enough for the CUDA of JAX."""
    try:
        gpus = list_gpus()
    except (UserError, subprocess.TimeoutExpired) as error:
        fix = "load or install NVIDIA's driver, and look at `dmesg`"
        return [CheckResult("fail", "driver", f"nvidia-smi does not work: {error}", fix)]
    if not gpus:
        return []
    version = gpus[0].driver
    for plugin, oldest in OLDEST_DRIVERS.items():
        if find_version(plugin) is not None and Version(version) < oldest:
            message = f"driver {version}, but {plugin} needs {oldest} or newer"
            return [CheckResult("fail", "driver", message, f"install driver {oldest} or newer")]
    counts = {gpu.name: sum(other.name == gpu.name for other in gpus) for gpu in gpus}
    names = ", ".join(f"{count} x {name}" for name, count in counts.items())
    return [CheckResult("ok", "driver", f"{version} for {names} ({gpus[0].memory} each)")]


def check_limits() -> list[CheckResult]:
    """Check the number of open files and the size of shared memory."""
    results = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        fix = f"ulimit -n {hard if 0 < hard < 65536 else 65536}"
        message = f"at most {soft} open files, but {OPEN_FILES} may be needed"
        results.append(CheckResult("warn", "limits", message, fix))
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free < SHARED_MEMORY:
        message = f"{format_bytes(shutil.disk_usage(shared).free)} free in /dev/shm"
        fix = "mount it larger; in a container, docker run --shm-size=8g"
        results.append(CheckResult("warn", "limits", message, fix))
    return results or [CheckResult("ok", "limits", f"{soft:,} open files")]


def check_port() -> list[CheckResult]:
    """Check the port at which the first host waits for the others: free on the first host, a known address on
    the others."""
    address, process = os.environ.get("HEADRACE_COORDINATOR", ""), os.environ.get("HEADRACE_PROCESS", "0")
    host, _, text = address.rpartition(":")
    if address and not (host and text.isdigit()):
        fix = "HEADRACE_COORDINATOR=10.0.0.1:8476"
        return [CheckResult("fail", "ports", f"found {address}, expected an address and a port", fix)]
    port = int(text or DEFAULT_PORT)
    if process != "0":
        return [check_first_host(host, port)]
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            state: State = "fail" if address else "warn"  # a single host needs no port
            message = f"{port}, where other hosts connect: {error.strerror}"
            find_user = f"ss -ltnp 'sport = :{port}'"
            fix = f"end the process that uses it (`{find_user}`), or set HEADRACE_COORDINATOR to another port"
            return [CheckResult(state, "ports", message, fix)]
    return [CheckResult("ok", "ports", f"{port} is free for the other hosts")]


def check_first_host(host: str, port: int) -> CheckResult:
    """Check that the address of the first host can be resolved."""
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        fix = "name the first host by an address that the others can resolve"
        message = f"{host}, the first host, cannot be resolved: {error.strerror}"
        return CheckResult("fail", "ports", message, fix)
    return CheckResult("ok", "ports", f"{host}:{port}, the first host, can be resolved")


def check_folders(cfg: sections.TrainRecipe | None) -> list[CheckResult]:
    """Check that the run folder can be written, the data read, and that the cache has room."""
    if cfg is None:
        free = format_bytes(shutil.disk_usage(".").free)
        message = f"{free} free here; with a recipe, the size of a checkpoint is shown"
        return [CheckResult("ok", "disk", message)]
    results = [check_writable(cfg.run_dir), check_data(cfg.data.path)]
    if files.is_url(cfg.data.path) or files.is_url(cfg.run_dir):
        results.append(check_cache(os.environ.get("HEADRACE_CACHE") or str(Path.home() / ".cache/headrace")))
    return results


def check_cache(cache: str) -> CheckResult:
    """Check that the folder for copies of remote files can be written and has room."""
    folder = nearest_existing(Path(cache))
    free, fix = shutil.disk_usage(folder).free, "set HEADRACE_CACHE to another folder"
    if not os.access(folder, os.W_OK):
        return CheckResult("fail", "cache", f"{cache} cannot be written", fix)
    if free < CACHE_BYTES:
        return CheckResult("warn", "cache", f"{format_bytes(free)} free in {cache}", fix)
    return CheckResult("ok", "cache", f"{format_bytes(free)} free in {cache}")


def check_writable(run_dir: str) -> CheckResult:
    """Check that a run folder can be written, by writing a file and deleting it."""
    name = files.redacted(run_dir)
    success = CheckResult("ok", "run", f"{name} can be written")
    if files.is_url(run_dir):
        if not run_dir.startswith("gs://"):
            expected = "a local folder or gs://BUCKET/FOLDER"
            return CheckResult("fail", "run", f"found {name}, expected {expected}", f"run_dir={expected}")
        try:
            url = files.join(run_dir, f".doctor-{uuid.uuid4().hex}")
            generation = files.write_if_generation(url, url.encode(), 0)
            files.delete_if_generation(url, generation or 0)
        except UserError as error:
            fix = "roles/storage.objectUser for this account: gcloud storage buckets add-iam-policy-binding"
            is_missing = "there is no bucket" in str(error)
            return CheckResult("fail", "run", str(error), "" if is_missing else fix)
        return success
    folder = nearest_existing(Path(run_dir))
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        is_full = error.errno == errno.ENOSPC
        fix = "make room" if is_full else f"chown or chmod {folder}, or set `run_dir` to another folder"
        return CheckResult("fail", "run", f"{folder}: {error.strerror}", fix)
    return success


def check_data(path: str) -> CheckResult:
    """Check that prepared data can be read."""
    from headrace.data.memory_map import open_folder, read_index

    try:
        index = read_index(open_folder(path))
    except (UserError, OSError) as error:
        has_advice = "headrace data prepare" in str(error)
        return CheckResult("fail", "data", str(error), "" if has_advice else "see docs/data.md")
    rows = index.splits["train"].rows
    message = f"{files.redacted(path)}: {rows:,} rows of {index.sequence_length:,} tokens"
    return CheckResult("ok", "data", message)


def nearest_existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    path = path.absolute()
    with contextlib.suppress(PermissionError):
        while not path.exists():
            path = path.parent
    return path
