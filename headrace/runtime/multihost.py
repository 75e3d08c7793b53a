"""Several hosts as one run: finding each other through jax.distributed, ending together with what one of them
finds wrong, and stopping at the same step. On a single host nothing of this is done."""

import contextlib
import errno
import hashlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from headrace.errors import ExitCode, UserError
from headrace.runtime import supervisor
from headrace.storage import redact

# Plain addresses: the same everywhere but for the last, which counts the hosts from 0.
NAMES = ("HEADRACE_COORDINATOR", "HEADRACE_PROCESSES", "HEADRACE_PROCESS")
HEARTBEAT = "HEADRACE_HEARTBEAT"  # seconds without a sign of life after which a host is taken for dead
PATIENCE = 10.0  # seconds to wait for a port
SAID = 480  # bytes of a message to the other hosts
SAME = 1.0  # seconds within which two Ctrl-C are one


def initialize() -> None:
    """Waits for the other hosts, if there are any; before anything else is asked of JAX."""
    if jax.distributed.is_initialized():
        return
    found = settings(os.environ)
    if found is None:
        return
    if found.get("process_id") == 0:
        free_port(found["coordinator_address"])
    # CPUs need to be told how to talk; others do not look at it.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**found, heartbeat_timeout_seconds=number(os.environ, HEARTBEAT, 60))
    except ValueError as error:
        if "should be defined" not in str(error):
            raise
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            raise UserError(
                "hosts: this is a pod of several, and JAX cannot ask the cluster for the others; install "
                f"jax[k8s], or set {', '.join(NAMES)} (or {NAMES[1]}=1 to train on each alone)"
            ) from None
        # else a TPU that belongs to no cluster


def free_port(address: str) -> None:
    """JAX crashes where somebody else has the port. A trainer that was just ended may take a while to let go
    of it."""
    port, end = int(address.rpartition(":")[2]), time.monotonic() + PATIENCE
    while True:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", port))
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    raise UserError(
                        f"{NAMES[0]}={address}: this host cannot take the port: {error.strerror}; choose "
                        "another on every host, or end what has it"
                    ) from None
        time.sleep(0.2)


def settings(env: Mapping[str, str]) -> dict[str, Any] | None:
    """What jax.distributed is to be told: all of it by plain addresses, next to nothing where it asks a
    cluster itself. None on a single host."""
    if any(name in env for name in NAMES):
        return explicit_settings(env)
    if "SLURM_STEP_NODELIST" in env and number(env, "SLURM_NTASKS", 1) > 1:
        # JAX would give each task one GPU, also the only task of a node.
        alone = env.get("SLURM_NTASKS") == env.get("SLURM_STEP_NUM_NODES")
        return {"local_device_ids": []} if alone else {}
    if number(env, "OMPI_COMM_WORLD_SIZE", 1) > 1:
        return {}
    if "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env:  # a job of several pods
        return {}
    # A TPU of Google's: where there is no chip, JAX sets this when it is imported.
    has_chip = "TPU_SKIP_MDS_QUERY" not in env or "," in env.get("TPU_WORKER_HOSTNAMES", "")
    return {} if has_chip and env.get("JAX_PLATFORMS", "") in ("", "tpu", "tpu,cpu") else None


def explicit_settings(env: Mapping[str, str]) -> dict[str, Any] | None:
    address, processes = env.get(NAMES[0], ""), number(env, NAMES[1], 0)
    if processes == 1:
        return None
    if processes < 1 or not address.rpartition(":")[2].isdigit() or ":" not in address:
        raise UserError(
            f"{NAMES[0]}={address} {NAMES[1]}={processes or env.get(NAMES[1], '')}: expected the address of "
            "the first host, as in 10.0.0.1:8476, and the number of hosts, on every host"
        )
    process = number(env, NAMES[2], -1)
    if not 0 <= process < processes:
        found = env.get(NAMES[2], "nothing")
        raise UserError(f"{NAMES[2]}: found {found}, expected this host's number, 0 to {processes - 1}")
    ids: list[int] = []  # all of a host's devices are its own
    return dict(
        coordinator_address=address, num_processes=processes, process_id=process, local_device_ids=ids
    )


def number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if text and not text.isdigit():
        raise UserError(f"{name}: found {text}, expected a number")
    return int(text) if text else default


def is_multi_host() -> bool:
    return jax.process_count() > 1


@contextlib.contextmanager
def fail_together(settings: str) -> Iterator[None]:
    """What one host finds wrong within, all of them end with, as they do if their settings differ. Else the
    others would wait for the one in vain. Within, nobody may wait for another host."""
    if not is_multi_host():
        yield
        return
    wrong: UserError | None = None
    try:
        yield
    except UserError as error:
        wrong = error
    text = "" if wrong is None else str(wrong)
    digest = hashlib.sha256(settings.encode()).digest()
    sent = np.zeros(32 + SAID, np.uint8)
    content = digest + text.encode()[:SAID]
    sent[: len(content)] = np.frombuffer(content, np.uint8)
    received = [bytes(row) for row in np.asarray(multihost_utils.process_allgather(sent))]
    if wrong is not None:
        raise wrong
    for host, row in enumerate(received):
        if said := row[32:].rstrip(b"\0").decode(errors="ignore"):
            raise UserError(f"host {host}: {said}")
    for host, row in enumerate(received):
        if row[:32] != received[0][:32]:
            raise UserError(f"host {host}: its recipe is not that of host 0; start all hosts with the same")


def reached_stop(step: int) -> bool:
    """Whether all hosts stop after this step, since one of them was asked to. To be asked after each step."""
    return multihost_utils.reached_preemption_sync_point(step)


def broadcast_flag(word: str) -> None:
    """Lets the other hosts hear a word, through the service by which they found each other. JAX has no public
    way to it."""
    if is_multi_host():
        client: Any = distributed.global_state.client
        client.key_value_set(f"headrace/{word}", "1", allow_overwrite=True)


def flag_is_set(word: str) -> bool:
    if not is_multi_host():
        return False
    client: Any = distributed.global_state.client
    try:
        return bool(client.key_value_try_get(f"headrace/{word}"))
    except jax.errors.JaxRuntimeError:  # nobody called
        return False


def publish(key: str, value: str) -> None:
    """Leaves a word for the others, in the place of the last one under that key."""
    client: Any = distributed.global_state.client
    client.key_value_set(f"headrace/{key}", value, allow_overwrite=True)


def read_published(folder: str) -> dict[str, str]:
    """What was left under the keys of a folder."""
    client: Any = distributed.global_state.client
    return {key.rpartition("/")[2]: value for key, value in client.key_value_dir_get(f"headrace/{folder}/")}


class Stopper:
    """Turns SIGTERM (preemption) and Ctrl-C into a wish the loop sees after the step at hand. A second
    Ctrl-C stops at once, if it is one: who sends the first to a group of processes sends it twice to us.
    Of several hosts JAX has the handler of SIGTERM, and agrees on a step with the others: a handler of ours
    would take that away."""

    def __enter__(self) -> "Stopper":
        self.stop_signal: str | None = None
        self.when = 0.0
        self.multi_host = is_multi_host()
        numbers = (signal.SIGINT,) if self.multi_host else (signal.SIGTERM, signal.SIGINT)
        self.before = {number: signal.signal(number, self.handle_signal) for number in numbers}
        return self

    def handle_signal(self, number: int, frame: Any) -> None:
        again, self.when = time.monotonic() - self.when > SAME, time.monotonic()
        if self.stop_signal and number == signal.SIGINT:
            if again:
                raise KeyboardInterrupt
            return
        self.stop_signal = signal.Signals(number).name
        if self.multi_host:
            os.kill(os.getpid(), signal.SIGTERM)

    def should_stop(self, step: int) -> bool:
        """Whether the run stops after this step."""
        if not self.multi_host:
            return self.stop_signal is not None
        stops = reached_stop(step)
        if stops and self.stop_signal is None:
            self.stop_signal = "SIGTERM"
        return stops

    def can_abort(self) -> bool:
        """Whether to leave off in the middle of something: never where other hosts are in it too."""
        return not self.multi_host and self.stop_signal is not None

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exit_codes(*, owns_process: bool) -> Iterator[None]:
    """Gives errors that nobody foresaw an exit code by their cause. And a process that fails ends at once, if
    it is one of several: in a regular end it would wait for the others, which wait for it. So does one that
    is told twice to stop, whatever its threads are writing."""
    try:
        yield
    except KeyboardInterrupt:
        if not owns_process:
            raise
        print("headrace: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    except Exception as error:
        together = jax.distributed.is_initialized()
        code = (
            error.exit_code if isinstance(error, UserError) else supervisor.verdict(error, several=together)
        )
        if not owns_process or not (together or code in (ExitCode.MACHINE_FAULT, ExitCode.LOST_HOST)):
            raise
        sys.stdout.flush()
        told = traceback.format_exc() if code == 1 else f"headrace: {' '.join(str(error).split())[:500]}\n"
        print(redact.redact(told), end="", file=sys.stderr, flush=True)
        if together and jax.process_index() == 0:
            time.sleep(1)  # its end ends the others, who may have the same to tell
        os._exit(code)
