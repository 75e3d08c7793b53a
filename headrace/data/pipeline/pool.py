"""Runs the units of a stage: in processes of this machine, or as tasks of a Ray cluster. A unit writes its
files atomically and gives the same bytes whenever and wherever it runs, so one that died is run again."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

from headrace.runtime.malloc import keep_freed
from headrace.errors import UserError

Item = TypeVar("Item")
Unit = Callable[[Item], Any]

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MASTER = "HEADRACE_MASTER"  # tells the server that forks workers who started it
RETRIES = 3  # of a unit whose worker died
QUEUED = 2  # units a worker in flight: the next is there when one ends, and a stop leaves few behind


@dataclass(frozen=True)
class Engine:
    use: str = "local"
    workers: int = 1

    @classmethod
    def of(cls, recipe: Any) -> "Engine":
        return cls(
            recipe.engine, len(os.sched_getaffinity(0)) if recipe.workers == "auto" else recipe.workers
        )

    def run(self, unit: Unit, items: Sequence[Item]) -> Iterator[tuple[Item, Any]]:
        """Yields each item with what the unit made of it, as they end. The first error ends all."""
        if self.use == "ray":
            return on_ray(unit, items, self.workers)
        if min(self.workers, len(items)) <= 1:  # starting processes would take longer than it saves
            return ((item, unit(item)) for item in items)
        return in_processes(unit, items, self.workers)


def in_processes(unit: Unit, items: Sequence[Item], workers: int) -> Iterator[tuple[Item, Any]]:
    left, died = list(items), 0
    while left:
        try:
            with ProcessPoolExecutor(min(workers, len(left)), context(), start_worker) as pool:
                submit = partial(pool.submit, unit)  # type: ignore[call-arg]
                for item, result in in_flight(submit, left, QUEUED * workers, collect):
                    left.remove(item)
                    yield item, result
        except BrokenProcessPool:
            died += 1
            if died > RETRIES:
                raise UserError(
                    f"a worker was killed {died} times, most likely for want of memory; set `workers` "
                    "lower and run the command again: what is finished is kept"
                ) from None


def collect(running: dict[Future, Any]) -> list[tuple[Future, Any]]:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    return [(future, future.result()) for future in done]


def in_flight(
    submit: Callable[[Item], Any], items: Sequence[Item], most: int, collect: Callable[[dict], list]
) -> Iterator[tuple[Item, Any]]:
    """Keeps at most so many units under way."""
    running: dict[Any, Item] = {}
    waiting = iter(list(items))
    try:
        while True:
            for item in waiting:
                running[submit(item)] = item
                if len(running) >= most:
                    break
            if not running:
                return
            for key, result in collect(running):
                yield running.pop(key), result
    finally:
        for key in running:
            if isinstance(key, Future):
                key.cancel()


def start_worker() -> None:
    """One thread a worker: the processes are the parallelism."""
    import pyarrow as pa

    from headrace.data.pipeline import worker_guard as tied

    tied.tie(tied.server)
    keep_freed(1 << 30)
    gc.freeze()  # what was imported stays, and need not be looked through for what can go
    os.environ.update(ONE_THREAD)
    pa.set_memory_pool(pa.system_memory_pool())  # whose memory stays too
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


@cache
def context() -> Any:
    """Workers are forked from a server that has imported what they need, and has no threads yet."""
    os.environ[MASTER] = str(os.getpid())
    chosen = multiprocessing.get_context("forkserver")
    stages = ["headrace.data.clean.normalize", "headrace.data.pack_job", "headrace.data.shuffle"]
    # gigatoken and awkward take half a second
    chosen.set_forkserver_preload(["headrace.data.pipeline.worker_guard", *stages, "gigatoken", "awkward"])
    return chosen


def on_ray(unit: Unit, items: Sequence[Item], workers: int) -> Iterator[tuple[Item, Any]]:
    """Tasks on the cluster that RAY_ADDRESS names or that runs on this machine, else on one started here."""
    try:
        import ray
    except ImportError:
        raise UserError('engine: ray is not installed; `pip install ".[ray]"` installs it') from None
    connect(ray, workers)

    here = os.getcwd()

    @ray.remote(num_cpus=1, max_retries=RETRIES)
    def task(item: Item) -> Any:
        os.chdir(here)  # what relative paths are seen from
        os.environ.update(ONE_THREAD)
        return unit(item)

    def collect(running: dict[Any, Item]) -> list[tuple[Any, Any]]:
        done, _ = ray.wait(list(running))
        return [(key, result_of(ray, key)) for key in done]

    slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
    yield from in_flight(task.remote, items, QUEUED * slots, collect)


def connect(ray: Any, workers: int) -> None:
    if ray.is_initialized():
        return
    quiet = dict(log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        if os.environ.get("RAY_ADDRESS"):
            raise UserError(f"engine: no Ray cluster answers at {os.environ['RAY_ADDRESS']}") from None
        ray.init(num_cpus=workers, include_dashboard=False, **quiet)


def result_of(ray: Any, key: Any) -> Any:
    try:
        return ray.get(key)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, UserError) else error from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise UserError(
            f"a Ray worker died {RETRIES + 1} times over one unit, most likely for want of memory ({error})"
        ) from None
