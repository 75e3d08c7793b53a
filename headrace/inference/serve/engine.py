"""Generation of several texts at once: a fixed number of slots, each with its own cache, and a compiled step
that generates a token for every slot.

A job starts and ends between two steps. Slots do not see each other, so that a job generates the same text as
it would alone."""

import functools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference.cast_weights import cast_weights, make_execution
from headrace.inference.generate import decode_step
from headrace.inference.sampling import Sampling, sample_token, sample_token_dynamic
from headrace.models import Model, ModelConfig
from headrace.nn.module import Array, PyTree
from headrace.nn.soft_cap import apply_soft_cap
from headrace.nn.stack import Execution

MAX_CHUNK = 256  # tokens of a prompt that run through the model at a time

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class EngineStopped(Exception):
    """Raised for jobs submitted to an engine that was closed or has failed."""


@dataclass(eq=False)
class GenerationJob:
    """A text to be continued. Iterating over it waits for its tokens."""

    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]  # tokens that end the text
    is_abandoned: Callable[[], bool]  # called for every token; True: the job is not needed any more
    output: queue.Queue[int | BaseException | None] = field(default_factory=queue.Queue)  # None: finished
    generated: int = 0  # number of tokens
    last_token: int = 0  # input of the next step
    finish_reason: FinishReason | None = None
    cancelled: bool = False

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they are generated, without the one that ends the text. Raises the error of a
        job that failed."""
        while (token := self.output.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token

    def cancel(self) -> None:
        """Stop generating. The slot becomes free after the current step."""
        self.cancelled = True

    @property
    def is_unwanted(self) -> bool:
        return self.cancelled or self.is_abandoned()

    def push(self, token: int) -> None:
        """Add a generated token. Finishes the job if it is the last one."""
        self.last_token = token
        if self.is_unwanted:
            self.finish("cancelled")
        elif token in self.stop_ids:
            self.finish("stop")
        else:
            self.generated += 1
            self.output.put(token)
            if self.generated == self.max_tokens:
                self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """End the job's iteration."""
        self.finish_reason = reason
        self.output.put(None)

    def fail(self, error: BaseException) -> None:
        """End the job's iteration with an error."""
        self.finish_reason = "failed"
        self.output.put(error)


class BatchEngine:
    """A thread that generates tokens for up to `slots` jobs at once; further ones wait in a queue."""

    def __init__(
        self,
        run: LoadedRun,
        *,
        slots: int,
        length: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """`length` is the most tokens of a prompt and its continuation together. `on_failure` is called, in
        the thread, with an error that ends it."""
        self.run, self.slots, self.length, self.on_failure = run, slots, length, on_failure
        self.waiting: queue.Queue[GenerationJob | None] = queue.Queue()  # None wakes up the thread
        self.jobs: list[GenerationJob | None] = [None] * slots
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.closed = False
        self.error: BaseException | None = None
        self.lock = threading.Lock()  # of `closed`: no job is queued after the last one was failed
        self.cfg: ModelConfig = run.recipe.model
        self.exec_opts = make_execution(run)
        with jax.set_mesh(run.mesh):
            self.model = cast_weights(run, self.exec_opts)
            init_cache = functools.partial(self.model.init_cache, self.cfg, 1, length, self.exec_opts.dtype)
            self.init_cache = jax.jit(init_cache)
            self.caches = jax.jit(lambda: jax.tree.map(lambda x: jnp.stack([x] * slots), init_cache()))()

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def submit(
        self,
        prompt_ids: list[int],
        max_tokens: int | None,
        sampling: Sampling,
        stop_ids: frozenset[int],
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> GenerationJob:
        """Queue a text to be continued, by `max_tokens` or, if None, by as many as there is room for.

        Raises UserError if there is no room for it, EngineStopped if the engine does not run any more."""
        room = self.length - len(prompt_ids)
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens, and there is room for {self.length - 1}"
            )
        if max_tokens is not None and max_tokens > room:
            raise UserError(
                f"max_tokens: found {max_tokens}, expected at most {room} after a prompt of "
                f"{len(prompt_ids)} tokens, since this server has room for {self.length}"
            )
        job = GenerationJob(list(prompt_ids), max_tokens or room, sampling, stop_ids, is_abandoned)
        with self.lock:
            if self.closed:
                raise EngineStopped(f"the server has stopped: {self.error or 'it was closed'}")
            self.waiting.put(job)
        return job

    def close(self) -> None:
        """Stop the thread after the current step; unfinished jobs are cancelled."""
        with self.lock:
            self.closed = True
            self.waiting.put(None)
        if self.thread.ident is not None:
            self.thread.join()

    def _run(self) -> None:
        try:
            while not self.closed:
                self._admit()
                if any(self.jobs):
                    self._step()
        except BaseException as error:  # passed on to all jobs, which would wait forever otherwise
            self.error = error
        with self.lock:
            self.closed = True
        for job in [*self.jobs, *_drain(self.waiting)]:
            if job is not None and job.finish_reason is None:
                job.fail(self.error) if self.error else job.finish("cancelled")
        if self.error:
            self.on_failure(self.error)

    def _admit(self) -> None:
        """Move waiting jobs into free slots. If all slots are free, wait for a job."""
        free = [slot for slot, job in enumerate(self.jobs) if job is None]
        while free and not self.closed:
            try:
                job = self.waiting.get(block=len(free) == self.slots)
            except queue.Empty:
                return
            if job is None:
                return
            if job.is_unwanted:
                job.finish("cancelled")
                continue
            self.jobs[free[0]] = job
            self._start_job(job, free[0])
            if job.finish_reason is None:
                free.pop(0)
            else:
                self.jobs[free[0]] = None

    def _start_job(self, job: GenerationJob, slot: int) -> None:
        """Run the prompt through the model, which generates the first token."""
        try:
            token, cache = self._prefill(job)
        except Exception as error:  # e.g. not enough memory; the other slots are intact
            job.fail(error)
            return
        with jax.set_mesh(self.run.mesh):
            self.caches = _write_slot(self.caches, cache, slot)
        job.push(token)

    def _prefill(self, job: GenerationJob) -> tuple[int, PyTree]:
        """The first token of a job and the cache of its prompt."""
        with jax.set_mesh(self.run.mesh):
            cache = self.init_cache()
            for chunk in split_prompt(job.prompt_ids):
                tokens = jnp.asarray([chunk], jnp.int32)
                logits, cache = decode_step(self.model, tokens, cache, self.cfg, self.exec_opts)
            key = jax.random.fold_in(jax.random.key(job.sampling.seed), 0)
            logits = apply_soft_cap(logits, self.run.recipe.loss.soft_cap)
            return int(sample_token(logits, key, job.sampling)), cache

    def _step(self) -> None:
        """Generate one token for each slot. Those of empty slots are ignored."""
        idle = GenerationJob([], 0, Sampling(temperature=0.0, top_k=0), frozenset(), lambda: False)
        jobs = [idle if job is None else job for job in self.jobs]
        with jax.set_mesh(self.run.mesh):
            tokens, self.caches = generate_step(
                self.model,
                jnp.asarray([job.last_token for job in jobs], jnp.int32),
                self.caches,
                jnp.asarray([job.sampling.seed for job in jobs], jnp.uint32),
                jnp.asarray([job.generated for job in jobs], jnp.int32),
                jnp.asarray([job.sampling.temperature for job in jobs], jnp.float32),
                jnp.asarray([job.sampling.top_k for job in jobs], jnp.int32),
                jnp.asarray([job.sampling.top_p for job in jobs], jnp.float32),
                cfg=self.cfg,
                exec_opts=self.exec_opts,
                soft_cap=self.run.recipe.loss.soft_cap,
            )
        for slot, token in enumerate(np.asarray(tokens).tolist()):
            if (job := self.jobs[slot]) is not None:
                job.push(token)
                if job.finish_reason is not None:
                    self.jobs[slot] = None


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts", "soft_cap"), donate_argnames="caches")
def generate_step(
    model: Model,
    last_tokens: Array,
    caches: PyTree,
    seeds: Array,
    counts: Array,
    temperatures: Array,
    top_ks: Array,
    top_ps: Array,
    *,
    cfg: ModelConfig,
    exec_opts: Execution,
    soft_cap: float | None,
) -> tuple[Array, PyTree]:
    """Generate the next token of every slot: [slots], as all arrays. `counts` are the numbers of tokens
    generated so far. Returns the updated caches too."""
    decode = lambda token, cache: decode_step(model, token[None, None], cache, cfg, exec_opts)
    try:
        logits, caches = jax.vmap(decode)(last_tokens, caches)
    except NotImplementedError:  # the experts' product, ragged_dot, has no batching rule for it in jax 0.10
        logits, caches = jax.lax.map(lambda slot: decode(*slot), (last_tokens, caches))
    keys = jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seeds, counts)
    logits = apply_soft_cap(logits, soft_cap)
    return jax.vmap(sample_token_dynamic)(logits, keys, temperatures, top_ks, top_ps), caches


@functools.partial(jax.jit, donate_argnums=0)
def _write_slot(caches: PyTree, cache: PyTree, slot: int) -> PyTree:
    return jax.tree.map(lambda stacked, leaf: stacked.at[slot].set(leaf), caches, cache)


def split_prompt(prompt_ids: list[int]) -> Iterator[list[int]]:
    """Split a prompt into chunks of 256, 128, ... 1 tokens.

    Nine compiled programs then serve every length without padding, which a recurrent model could not
    forget."""
    start = 0
    while start < len(prompt_ids):
        size = min(MAX_CHUNK, 1 << ((len(prompt_ids) - start).bit_length() - 1))
        yield prompt_ids[start : start + size]
        start += size


def _drain(waiting: queue.Queue[GenerationJob | None]) -> Iterator[GenerationJob | None]:
    while not waiting.empty():
        yield waiting.get()
