"""Several hosts as one run: find each other through jax.distributed, and end together.

On a single host none of this happens."""

import contextlib
import errno
import hashlib
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from headrace.errors import ExitCode, UserError
from headrace.runtime import supervisor
from headrace.storage import redact

# Environment variables, the same on all hosts except for the last, which numbers the hosts from 0.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = "HEADRACE_COORDINATOR", "HEADRACE_PROCESSES", "HEADRACE_PROCESS"
NAMES = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
HEARTBEAT = "HEADRACE_HEARTBEAT"  # seconds without a sign of life after which a host counts as dead
PORT_TIMEOUT = 10.0  # seconds to wait for a port
MAX_MESSAGE = 480  # bytes of a message to the other hosts


class DistributedSettings(TypedDict, total=False):
    """Arguments of `jax.distributed.initialize`. It asks a cluster for those that are missing."""

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int]


def initialize() -> None:
    """Connect to the other hosts, if there are any. Must come before any other use of JAX."""
    if jax.distributed.is_initialized():
        return
    settings = find_settings(os.environ)
    if settings is None:
        return
    if settings.get("process_id") == 0:
        wait_for_port(settings["coordinator_address"])
    # For CPUs, which have no default; other devices do not use it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        heartbeat = read_int(os.environ, HEARTBEAT, 60)
        jax.distributed.initialize(**settings, heartbeat_timeout_seconds=heartbeat)
    except ValueError as error:
        if "should be defined" not in str(error):
            raise
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            raise UserError(
                "hosts: this is one of several pods, and JAX cannot ask the cluster for the others; install "
                f"jax[k8s], or set {', '.join(NAMES)} (or {NUM_PROCESSES}=1 to train on each of them "
                "separately)"
            ) from None
        # else a TPU that is not part of a cluster


def wait_for_port(address: str) -> None:
    """Wait until the coordinator's port is free. JAX crashes if it is not, and a trainer that was just
    stopped may take a while to release it."""
    port, deadline = int(address.rpartition(":")[2]), time.monotonic() + PORT_TIMEOUT
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise UserError(
                        f"{COORDINATOR}={address}: this host cannot use the port: {error.strerror}; choose "
                        "another on every host, or end the process that uses it"
                    ) from None
        time.sleep(0.2)


def find_settings(env: Mapping[str, str]) -> DistributedSettings | None:
    """Find out from the environment how to connect to the other hosts. None on a single host."""
    if any(name in env for name in NAMES):
        return explicit_settings(env)
    if "SLURM_STEP_NODELIST" in env and read_int(env, "SLURM_NTASKS", 1) > 1:
        # JAX would use one GPU per task, even for the only task of a node.
        one_task_per_node = env.get("SLURM_NTASKS") == env.get("SLURM_STEP_NUM_NODES")
        return {"local_device_ids": []} if one_task_per_node else {}
    if read_int(env, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        return {}
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:  # a job of several pods
        return {}
    # A Cloud TPU: JAX sets this variable at import if there is no chip.
    has_chip = "TPU_SKIP_MDS_QUERY" not in env or "," in env.get("TPU_WORKER_HOSTNAMES", "")
    return {} if has_chip and env.get("JAX_PLATFORMS", "") in ("", "tpu", "tpu,cpu") else None


def explicit_settings(env: Mapping[str, str]) -> DistributedSettings | None:
    """Read the settings from Headrace's own variables. None if they say that there is one host."""
    address, processes = env.get(COORDINATOR, ""), read_int(env, NUM_PROCESSES, 0)
    if processes == 1:
        return None
    if processes < 1 or not address.rpartition(":")[2].isdigit() or ":" not in address:
        raise UserError(
            f"{COORDINATOR}={address} {NUM_PROCESSES}={processes or env.get(NUM_PROCESSES, '')}: expected "
            "the address of the first host, as in 10.0.0.1:8476, and the number of hosts, on every host"
        )
    process = read_int(env, PROCESS_ID, -1)
    if not 0 <= process < processes:
        value = env.get(PROCESS_ID, "nothing")
        raise UserError(f"{PROCESS_ID}: found {value}, expected this host's number, 0 to {processes - 1}")
    return {
        "coordinator_address": address,
        "num_processes": processes,
        "process_id": process,
        "local_device_ids": [],  # all devices of the host
    }


def read_int(env: Mapping[str, str], name: str, default: int) -> int:
    """Read a number from an environment variable."""
    text = env.get(name, "")
    if text and not text.isdigit():
        raise UserError(f"{name}: found {text}, expected a number")
    return int(text) if text else default


def is_multi_host() -> bool:
    """Whether the run has several processes."""
    return jax.process_count() > 1


@contextlib.contextmanager
def fail_together(recipe_yaml: str) -> Iterator[None]:
    """End all hosts with the UserError that one of them raises in this context, or if their recipes differ.

    Otherwise the others would wait for that host in vain. Inside, no host may wait for another."""
    if not is_multi_host():
        yield
        return
    error: UserError | None = None
    try:
        yield
    except UserError as user_error:
        error = user_error
    messages, digests = exchange("" if error is None else str(error), recipe_yaml)
    if error is not None:
        raise error
    for host, message in enumerate(messages):
        if message:
            raise UserError(f"host {host}: {message}")
    for host, digest in enumerate(digests):
        if digest != digests[0]:
            raise UserError(f"host {host}: its recipe is not that of host 0; start all hosts with the same")


def exchange(message: str, recipe_yaml: str) -> tuple[list[str], list[bytes]]:
    """Send a message and a digest of the recipe to all hosts. Returns those of all hosts, in their order."""
    digest = hashlib.sha256(recipe_yaml.encode()).digest()
    content = digest + message.encode()[:MAX_MESSAGE]
    sent = np.zeros(len(digest) + MAX_MESSAGE, np.uint8)
    sent[: len(content)] = np.frombuffer(content, np.uint8)
    received = [bytes(row) for row in np.asarray(multihost_utils.process_allgather(sent))]
    texts = [row[len(digest) :].rstrip(b"\0").decode(errors="ignore") for row in received]
    return texts, [row[: len(digest)] for row in received]


def broadcast_flag(name: str) -> None:
    """Set a flag that all hosts can read."""
    if is_multi_host():
        publish(name, "1")


def flag_is_set(name: str) -> bool:
    """Whether a host has set this flag."""
    if not is_multi_host():
        return False
    try:
        return bool(_client().key_value_try_get(f"headrace/{name}"))
    except jax.errors.JaxRuntimeError:  # no host has set it
        return False


def publish(key: str, value: str) -> None:
    """Store a value that all hosts can read, in place of the last one under that key."""
    _client().key_value_set(f"headrace/{key}", value, allow_overwrite=True)


def read_published(folder: str) -> dict[str, str]:
    """Read the values under the keys FOLDER/NAME, by name."""
    pairs = _client().key_value_dir_get(f"headrace/{folder}/")
    return {key.rpartition("/")[2]: value for key, value in pairs}


def _client() -> Any:
    """The client of JAX's coordination service, through which the hosts found each other. JAX has no public
    access to it."""
    return distributed.global_state.client


@contextlib.contextmanager
def exit_codes(*, owns_process: bool) -> Iterator[None]:
    """End the process at once where a regular exit would hang, with an exit code by the cause of the error.

    With several hosts, a process that fails would wait at exit for the others, which wait for it. A second
    Ctrl-C does not wait for what threads are writing. If `owns_process` is false, errors are only raised:
    Python continues after the run."""
    try:
        yield
    except KeyboardInterrupt:
        if not owns_process:
            raise
        print("headrace: interrupted", file=sys.stderr, flush=True)
        os._exit(ExitCode.INTERRUPTED)
    except Exception as error:
        multi_host = jax.distributed.is_initialized()
        if isinstance(error, UserError):
            code = error.exit_code
        else:
            code = supervisor.exit_code_of(error, multi_host=multi_host)
        if not owns_process or not (multi_host or code in (ExitCode.MACHINE_FAULT, ExitCode.LOST_HOST)):
            raise
        sys.stdout.flush()
        one_line = f"headrace: {' '.join(str(error).split())[:500]}\n"
        text = traceback.format_exc() if code == ExitCode.FAILED else one_line
        print(redact.redact(text), end="", file=sys.stderr, flush=True)
        if multi_host and jax.process_index() == 0:
            time.sleep(1)  # its end ends the others, which may have an error to print too
        os._exit(code)
