"""Many texts continued at once: a fixed number of slots, each with a cache of its own, and one compiled step
that gives a token to every slot. A request joins between two tokens; what it gets is what it would get alone,
since nothing of one slot is seen by another."""

import functools
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference import generate
from headrace.inference.sampling import Sampling, sample_token, sample_token_dynamic
from headrace.low_precision.cast import cast
from headrace.model_wrappers import load_family
from headrace.models import fixed_matmul
from headrace.nn.module import Array, axes
from headrace.nn.stack import Execution

PIECE = 256  # tokens of a prompt that go through the model at a time, at most

Ending = Literal["stop", "length", "cancelled", "failed"]


class Stopped(Exception):
    """The engine makes no more tokens."""


@dataclass(eq=False)
class GenerationJob:
    """A text that is being continued."""

    ids: list[int]
    tokens: int
    sampling: Sampling
    ends: frozenset[int]  # tokens that end a text
    left: Callable[[], bool]  # whether nobody waits for it any more
    made: queue.Queue[int | BaseException | None] = field(default_factory=queue.Queue)
    count: int = 0
    last: int = 0  # the token that the next follows
    ending: Ending | None = None
    cancelled: bool = False

    def __iter__(self) -> Iterator[int]:
        """Tokens as they come, the one that ends the text left out."""
        while (token := self.made.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token

    def cancel(self) -> None:
        """Nobody reads on: its slot is free after the token that is being made."""
        self.cancelled = True

    @property
    def is_unwanted(self) -> bool:
        return self.cancelled or self.left()

    def push(self, token: int) -> None:
        if self.is_unwanted:
            return self.finish("cancelled")
        if token in self.ends:
            return self.finish("stop")
        self.count += 1
        self.made.put(token)
        if self.count == self.tokens:
            self.finish("length")

    def finish(self, how: Ending) -> None:
        self.ending = how
        self.made.put(None)

    def fail(self, error: BaseException) -> None:
        """Tells whoever waits for it."""
        self.ending = "failed"
        self.made.put(error)


class BatchEngine:
    def __init__(self, run: LoadedRun, *, slots: int, length: int) -> None:
        """`length` is that of prompt and answer together, for which each slot has room."""
        self.run, self.slots, self.length = run, slots, length
        self.waiting: queue.Queue[GenerationJob | None] = queue.Queue()
        self.jobs: list[GenerationJob | None] = [None] * slots
        self.thread = threading.Thread(target=self.work, name="engine", daemon=True)
        self.closed = False
        self.error: BaseException | None = None
        self.entrance = threading.Lock()  # none joins the queue after the last who is told of the end
        cfg = run.recipe.model
        self.exec_opts = Execution(run.recipe.attention, run.recipe.compute.dtype, matmul=fixed_matmul(cfg))
        with jax.set_mesh(run.mesh):
            names = axes(load_family(cfg).Model, cfg)
            self.model = jax.jit(lambda params: cast(params, names, self.exec_opts))(run.params)
            empty = functools.partial(self.model.init_cache, cfg, 1, length, self.exec_opts.dtype)
            self.empty = jax.jit(empty)
            self.caches = jax.jit(lambda: jax.tree.map(lambda x: jnp.stack([x] * slots), empty()))()

    def start(self) -> None:
        self.thread.start()

    def submit(
        self,
        ids: list[int],
        tokens: int | None,
        sampling: Sampling,
        ends: frozenset[int],
        left: Callable[[], bool] = lambda: False,
    ) -> GenerationJob:
        """Puts a text in the queue. Without a number of tokens, as many as there is room for. `left` is asked
        at every token, and its slot is free once nobody waits for it."""
        room = self.length - len(ids)
        if room < 1:
            raise UserError(f"the prompt has {len(ids)} tokens, and there is room for {self.length - 1}")
        if tokens is not None and tokens > room:
            raise UserError(
                f"max_tokens: found {tokens}, and after a prompt of {len(ids)} tokens there is room for "
                f"{room} of the {self.length} that this server was started with"
            )
        job = GenerationJob(list(ids), tokens or room, sampling, ends, left)
        with self.entrance:
            if self.closed:
                raise Stopped(f"the server has stopped: {self.error or 'it was closed'}")
            self.waiting.put(job)
        return job

    def close(self) -> None:
        with self.entrance:
            self.closed = True
            self.waiting.put(None)
        if self.thread.ident is not None:
            self.thread.join()

    def work(self) -> None:
        try:
            while not self.closed:
                self.admit()
                if any(self.jobs):
                    self.step()
        except BaseException as error:  # told to whoever waits, instead of letting them wait for ever
            self.error = error
            print(f"the model failed, and nothing is answered any more: {error}", file=sys.stderr, flush=True)
        with self.entrance:
            self.closed = True
        for job in [*self.jobs, *iter_queue(self.waiting)]:
            if job is not None and job.ending is None:
                job.fail(self.error) if self.error else job.finish("cancelled")

    def admit(self) -> None:
        """Requests that wait, into slots that are free; where there is nothing to do, waits for one."""
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
            self.enter(job, free[0])
            if job.ending is None:
                free.pop(0)
            else:
                self.jobs[free[0]] = None

    def enter(self, job: GenerationJob, slot: int) -> None:
        """The prompt once through the model, which gives the first token."""
        try:
            token, cache = self.read(job)
        except Exception as error:  # such as no memory for it: the others have what is theirs
            return job.fail(error)
        with jax.set_mesh(self.run.mesh):
            self.caches = put(self.caches, cache, slot)
        job.last = token
        job.push(token)

    def read(self, job: GenerationJob) -> tuple[int, Any]:
        cfg = self.run.recipe.model
        with jax.set_mesh(self.run.mesh):
            cache = self.empty()
            for piece in pieces_of(job.ids):
                logits, cache = generate.step(
                    self.model, jnp.asarray([piece], jnp.int32), cache, cfg, self.exec_opts
                )
            key = jax.random.fold_in(jax.random.key(job.sampling.seed), 0)
            token = sample_token(
                generate.soft_cap_logits(logits, self.run.recipe.loss.soft_cap), key, job.sampling
            )
        return int(token), cache

    def step(self) -> None:
        """One token for each slot; those of empty slots are made and left."""
        each = lambda of, otherwise, dtype: jnp.asarray(
            [otherwise if job is None else of(job) for job in self.jobs], dtype
        )
        with jax.set_mesh(self.run.mesh):
            tokens, self.caches = advance(
                self.model,
                each(lambda job: job.last, 0, jnp.int32),
                self.caches,
                each(lambda job: job.sampling.seed, 0, jnp.uint32),
                each(lambda job: job.count, 0, jnp.int32),
                each(lambda job: job.sampling.temperature, 0.0, jnp.float32),
                each(lambda job: job.sampling.top_k, 0, jnp.int32),
                each(lambda job: job.sampling.top_p, 1.0, jnp.float32),
                cfg=self.run.recipe.model,
                exec_opts=self.exec_opts,
                cap=self.run.recipe.loss.soft_cap,
            )
        for slot, token in enumerate(np.asarray(tokens).tolist()):
            if (job := self.jobs[slot]) is not None:
                job.last = token
                job.push(token)
                if job.ending is not None:
                    self.jobs[slot] = None


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts", "cap"), donate_argnames="caches")
def advance(
    model: Any,
    tokens: Array,
    caches: Any,
    seeds: Array,
    counts: Array,
    temperatures: Array,
    top_ks: Array,
    top_ps: Array,
    *,
    cfg: Any,
    exec_opts: Execution,
    cap: float | None,
) -> tuple[Array, Any]:
    """The next token of every slot, and the caches with the last ones."""
    one = lambda token, cache: generate.step(model, token[None, None], cache, cfg, exec_opts)
    try:
        logits, caches = jax.vmap(one)(tokens, caches)
    except NotImplementedError:  # the products of experts, ragged_dot: jax 0.10 has them one text at a time
        logits, caches = jax.lax.map(lambda each: one(*each), (tokens, caches))
    keys = jax.vmap(lambda seed, count: jax.random.fold_in(jax.random.key(seed), count))(seeds, counts)
    return jax.vmap(sample_token_dynamic)(
        generate.soft_cap_logits(logits, cap), keys, temperatures, top_ks, top_ps
    ), caches


@functools.partial(jax.jit, donate_argnums=0)
def put(caches: Any, one: Any, slot: Any) -> Any:
    return jax.tree.map(lambda every, own: every.at[slot].set(own), caches, one)


def pieces_of(ids: list[int]) -> Iterator[list[int]]:
    """A prompt in pieces of 256, 128, ... 1 tokens, so that nine programs do for every length, and nothing is
    padded: what a recurrent model has read cannot be taken back."""
    start = 0
    while start < len(ids):
        size = min(PIECE, 1 << ((len(ids) - start).bit_length() - 1))
        yield ids[start : start + size]
        start += size


def iter_queue(waiting: queue.Queue[Any]) -> Iterator[Any]:
    while not waiting.empty():
        yield waiting.get()
