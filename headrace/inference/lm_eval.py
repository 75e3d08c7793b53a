"""A run as the model of lm-evaluation-harness, through its own interface (`pip install headrace[eval]`): its
tasks ask for the likelihood of texts, or for how one goes on. Also of quantised folders."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference import generate
from headrace.inference.sampling import Sampling
from headrace.inference.serve.engine import BatchEngine
from headrace.low_precision.cast import cast
from headrace.model_wrappers import load_family
from headrace.models import fixed_matmul
from headrace.nn.linear import project
from headrace.nn.module import Array, axes
from headrace.nn.stack import Execution

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError:
    raise UserError("--tasks: needs lm-evaluation-harness: pip install 'headrace[eval]'") from None

ROUND = 64  # texts are padded to a multiple of it, so that few programs are compiled
POSITIONS = 64  # of a text, whose logits are held at a time
SLOTS = 8  # texts that are continued at once


def evaluate(run: LoadedRun, tasks: list[str], *, limit: int | None, batch: int) -> str:
    """A table. A task is a name that the harness knows, or a file of one's own."""
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    for path in files:
        if not path.is_file():
            raise UserError(f"--tasks: no such file: {path}")
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    known = TaskManager(include_path=[str(path.parent) for path in files] or None)
    for name in names:
        if name not in known.all_tasks:
            raise UserError(f"--tasks: found {name}, which is no task of lm-evaluation-harness, nor a file")
    run = run.merged()
    with jax.set_mesh(run.mesh):
        result = simple_evaluate(
            model=Model(run, batch), tasks=names, task_manager=known, limit=limit, bootstrap_iters=1000
        )
    return make_table(result)


class Model(TemplateLM):
    """Texts begin with the token that texts began with in training, as in `headrace generate`."""

    def __init__(self, run: LoadedRun, batch: int = 8) -> None:
        super().__init__()
        if not run.recipe.model.causal or run.recipe.objective.use == "classify":
            raise UserError(f"--tasks: {run.recipe.run_dir} does not continue text, expected a decoder")
        if run.tokenizer is None:
            raise UserError(f"--tasks: {run.recipe.run_dir} has no tokenizer.json")
        self.run, self.inner, self.rows = run, run.tokenizer, batch
        self.length = run.recipe.data.sequence_length  # no longer than it was trained on
        cfg = run.recipe.model
        self.exec_opts = Execution(run.recipe.attention, run.recipe.compute.dtype, matmul=fixed_matmul(cfg))
        names = axes(load_family(cfg).Model, cfg)
        self.model = jax.jit(lambda params: cast(params, names, self.exec_opts))(run.params)

    @property
    def eot_token_id(self) -> int:
        special = self.inner.special
        return special.filler if special.eos is None else special.eos

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.inner.special.bos is None else self.inner.special.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **more: Any) -> list[int]:
        return self.inner.encode(string)

    def _loglikelihood_tokens(self, requests: list[Any], **more: Any) -> list[tuple[float, bool]]:
        """Of continuations: how likely each is, and whether it is the likeliest, token by token."""
        texts = []
        for _, context, following in requests:
            bos = self.inner.special.bos
            begun = [bos, *context] if bos is not None and context[:1] != [bos] else context
            whole = (begun + following)[-(self.length + 1) :]  # the latest that the model can see
            texts.append((whole, min(len(following), len(whole) - 1)))
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number][0]))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        for first in range(0, len(order), self.rows):
            some = order[first : first + self.rows]
            for number, told in zip(some, self.to_output([texts[number] for number in some]), strict=True):
                found[number] = told
        return found

    def to_output(self, texts: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        longest = max(len(whole) - 1 for whole, _ in texts)
        width = ROUND * math.ceil(max(longest, 1) / ROUND)
        tokens, counts = np.zeros((2, self.rows, width + 1), np.int32)
        for row, (whole, many) in enumerate(texts):
            tokens[row, : len(whole)] = whole
            counts[row, len(whole) - many - 1 : len(whole) - 1] = 1
        filled = np.array([len(whole) - 1 for whole, _ in texts] + [0] * (self.rows - len(texts)))
        segments = (np.arange(width) < filled[:, None]).astype(np.int32)
        cap, cfg = self.run.recipe.loss.soft_cap, self.run.recipe.model
        sums, likeliest = likelihoods(
            self.model,
            tokens[:, :-1],
            tokens[:, 1:],
            counts[:, :-1],
            segments,
            cfg=cfg,
            exec_opts=self.exec_opts,
            cap=cap,
        )
        return [(float(sums[row]), bool(likeliest[row])) for row in range(len(texts))]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token told once, by as many before it as the model can see."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, max_seq_len=self.length, context_len=1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(told for told, _ in self._windows(parts)))
        return found

    def _windows(self, parts: list[Any]) -> list[tuple[float, bool]]:
        """As they are: a window in the middle of a text does not begin one."""
        texts = [(before + following, len(following)) for _, before, following in parts]
        batches = [texts[n : n + self.rows] for n in range(0, len(texts), self.rows)]
        return [told for some in batches for told in self.to_output(some)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        special = self.inner.special
        ends = frozenset(id for id in (special.eos, special.bos) if id is not None)
        engine = BatchEngine(self.run, slots=min(SLOTS, len(requests)), length=self.length)
        engine.start()
        try:
            jobs = []
            for text, how in (request.args for request in requests):
                tokens = min(int(how.get("max_gen_toks", 256)), self.length // 2)
                ids = ([] if special.bos is None else [special.bos]) + self.tok_encode(text)
                ids = ids[-(self.length - tokens) :]
                temperature = float(how.get("temperature", 0.0)) if how.get("do_sample") else 0.0
                until = how.get("until") or []
                until = [until] if isinstance(until, str) else until
                jobs.append((engine.submit(ids, tokens, Sampling(temperature, 0, 1.0, 0), ends), ids, until))
            return [self.answer(*job) for job in jobs]
        finally:
            engine.close()

    def answer(self, job: Any, ids: list[int], until: list[str]) -> str:
        text = ""
        for piece in generate.decode_stream(self.run, ids, iter(job)):
            text += piece
            ends = [text.index(mark) for mark in until if mark and mark in text]
            if ends:
                job.cancel()
                return text[: min(ends)]
        return text


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts", "cap"))
def likelihoods(
    model: Any,
    inputs: Array,
    targets: Array,
    counts: Array,
    segments: Array,
    *,
    cfg: Any,
    exec_opts: Any,
    cap: Any,
) -> tuple[Array, Array]:
    """Of each row [b s]: the sum of the log-likelihoods of the targets that count, and whether each of them
    is the likeliest. Logits of a few positions are held at a time."""
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    hidden = model(cfg, inputs, exec_opts=exec_opts, segments=segments, positions=positions)

    def some(part: tuple[Array, Array]) -> tuple[Array, Array]:
        states, wanted = part
        logits = project(model.unembed, states, "bsd,vd->bsv").astype(jnp.float32)
        logits = generate.soft_cap_logits(logits, cap)
        own = jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        return own - jax.nn.logsumexp(logits, axis=-1), logits.argmax(axis=-1) == wanted

    cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, POSITIONS, *x.shape[2:]), 1, 0)
    told, best = jax.lax.map(some, (cut(hidden), cut(targets)))
    told, best = (jnp.moveaxis(x, 0, 1).reshape(inputs.shape) for x in (told, best))
    return jnp.sum(told * counts, axis=1), jnp.all(best | (counts == 0), axis=1)
