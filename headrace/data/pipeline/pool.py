"""Pool of workers for the jobs of a stage: processes of this machine, or tasks of a Ray cluster.

A job writes its files atomically, and its result depends on nothing but its input. So a job whose worker died
is simply run again, on any worker."""

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, TypeVar

from headrace.config.sections import DataRecipe
from headrace.errors import UserError
from headrace.runtime.malloc import keep_freed

Item = TypeVar("Item")
Result = TypeVar("Result")
Handle = TypeVar("Handle")  # of a job that runs: a Future, or an object reference of Ray

ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MASTER = "HEADRACE_MASTER"  # process id of the parent of the fork server
MAX_RETRIES = 3  # of a job whose worker died
QUEUED_PER_WORKER = 2  # jobs submitted: enough to keep a worker busy, and little is lost when we stop


@dataclass(frozen=True)
class WorkerPool:
    use: str = "local"  # or "ray"
    workers: int = 1

    @classmethod
    def from_recipe(cls, recipe: DataRecipe) -> "WorkerPool":
        """A pool as the recipe says, by default with a worker for each core."""
        workers = recipe.workers
        return cls(recipe.engine, workers if isinstance(workers, int) else len(os.sched_getaffinity(0)))

    def run(self, job: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        """Call `job` for each item. Yields items with their results, in the order in which they finish.

        The first error is raised, and ends all work."""
        if self.use == "ray":
            return run_on_ray(job, items, self.workers)
        if min(self.workers, len(items)) <= 1:  # starting processes would take longer than it saves
            return ((item, job(item)) for item in items)
        return run_in_processes(job, items, self.workers)


def run_in_processes(
    job: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Call `job` for each item in worker processes. Jobs whose worker was killed are run again."""
    remaining, deaths = list(items), 0
    while remaining:
        try:
            with ProcessPoolExecutor(min(workers, len(remaining)), worker_context(), start_worker) as pool:
                submit: Callable[[Item], Future[Result]] = partial(pool.submit, job)  # type: ignore[call-arg]
                for item, result in run_limited(submit, remaining, QUEUED_PER_WORKER * workers, wait_for_any):
                    remaining.remove(item)
                    yield item, result
        except BrokenProcessPool:
            deaths += 1
            if deaths > MAX_RETRIES:
                raise UserError(
                    f"a worker was killed {deaths} times, probably because memory ran out; set `workers` "
                    "lower and run the command again: finished work is kept"
                ) from None


def wait_for_any(
    running: dict["Future[Result]", Item],
) -> list[tuple["Future[Result]", Result]]:
    """Wait until a job has finished. Returns those that have, with their results."""
    finished, _ = wait(running, return_when=FIRST_COMPLETED)
    return [(future, future.result()) for future in finished]


def run_limited(
    submit: Callable[[Item], Handle],
    items: Sequence[Item],
    limit: int,
    wait_for_results: Callable[[dict[Handle, Item]], list[tuple[Handle, Result]]],
) -> Iterator[tuple[Item, Result]]:
    """Submit jobs, at most `limit` at a time, and yield items with their results as they finish."""
    running: dict[Handle, Item] = {}
    waiting = iter(list(items))
    try:
        while True:
            for item in waiting:
                running[submit(item)] = item
                if len(running) >= limit:
                    break
            if not running:
                return
            for handle, result in wait_for_results(running):
                yield running.pop(handle), result
    finally:
        for handle in running:
            if isinstance(handle, Future):
                handle.cancel()


def start_worker() -> None:
    """Initialize a worker process. It has one thread: the processes are the parallelism."""
    import pyarrow as pa

    from headrace.data.pipeline import worker_guard  # here: importing it ties this process to its parent

    worker_guard.die_with_parent(worker_guard.server)
    keep_freed(1 << 30)
    gc.freeze()  # what has been imported stays: the collector need not look at it
    os.environ.update(ONE_THREAD)
    pa.set_memory_pool(pa.system_memory_pool())  # so that Arrow keeps freed memory as well
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


class WorkerProcess(ForkServerProcess):
    """A worker, which does not import the main module of the program, as other processes of Python do.

    A script that calls `headrace.prepare_data` without a guard would do so again in every worker. Jobs are
    functions of this package, so nothing of the script is needed."""

    def start(self) -> None:
        """Start the worker without importing the main module of the program, which may be a script."""
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # without a file that the worker would import
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main_module


class WorkerContext(ForkServerContext):
    Process = WorkerProcess


@cache
def worker_context() -> WorkerContext:
    """The context in which workers start: forked from a server with their modules, and without threads."""
    os.environ[MASTER] = str(os.getpid())
    context = WorkerContext()
    stages = [f"headrace.data.{name}" for name in ("clean.normalize", "pack_job", "shuffle")]
    # gigatoken and awkward take half a second
    context.set_forkserver_preload(["headrace.data.pipeline.worker_guard", *stages, "gigatoken", "awkward"])
    return context


def run_on_ray(
    job: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Call `job` for each item as tasks of a Ray cluster.

    That is the cluster of RAY_ADDRESS, else one that runs on this machine, else one that is started here."""
    try:
        import ray
    except ImportError:
        raise UserError('engine: ray is not installed; `pip install ".[ray]"` installs it') from None
    connect_ray(ray, workers)

    directory = os.getcwd()

    @ray.remote(num_cpus=1, max_retries=MAX_RETRIES)
    def task(item: Item) -> Result:
        os.chdir(directory)  # relative paths start from here
        os.environ.update(ONE_THREAD)
        return job(item)

    def wait_for_any_task(running: dict[Any, Item]) -> list[tuple[Any, Result]]:
        finished, _ = ray.wait(list(running))
        return [(reference, get_ray_result(ray, reference)) for reference in finished]

    slots = max(1, int(ray.cluster_resources().get("CPU", 1)))
    yield from run_limited(task.remote, items, QUEUED_PER_WORKER * slots, wait_for_any_task)


def connect_ray(ray: ModuleType, workers: int) -> None:
    """Connect to a Ray cluster, or start one on this machine."""
    if ray.is_initialized():
        return
    quiet = dict(log_to_driver=False, logging_level="ERROR", configure_logging=False)
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        if os.environ.get("RAY_ADDRESS"):
            raise UserError(f"engine: no Ray cluster responds at {os.environ['RAY_ADDRESS']}") from None
        ray.init(num_cpus=workers, include_dashboard=False, **quiet)


def get_ray_result(ray: ModuleType, reference: Any) -> Any:
    """The result of a finished task. Its UserError is raised as it is, and a lost worker as one."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        raise cause if isinstance(cause, UserError) else error from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError) as error:
        raise UserError(
            f"a Ray worker died {MAX_RETRIES + 1} times on one job, probably because memory ran out ({error})"
        ) from None
