"""Evaluation on tasks of lm-evaluation-harness (`pip install headrace[eval]`): a run, quantized or not, as a
model of the harness."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference.cast_weights import cast_weights, make_execution
from headrace.inference.generate import decode_stream
from headrace.inference.sampling import Sampling
from headrace.inference.serve.engine import BatchEngine, GenerationJob
from headrace.models import Model, ModelConfig
from headrace.nn.linear import project
from headrace.nn.module import Array
from headrace.nn.soft_cap import apply_soft_cap
from headrace.nn.stack import Execution

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError:
    raise UserError("--tasks: needs lm-evaluation-harness: pip install 'headrace[eval]'") from None

LENGTH_MULTIPLE = 64  # texts are padded to a multiple of it, so that few programs are compiled
CHUNK_POSITIONS = 64  # positions of a text whose logits are in memory at a time
MAX_SLOTS = 8  # texts that are generated at once

Results: TypeAlias = dict[str, object]  # as lm-evaluation-harness returns them
# ((context, continuation) as texts, the context's tokens, the continuation's tokens)
EncodedPair: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]


def evaluate_tasks(
    run: LoadedRun, tasks: Sequence[str], *, max_examples: int | None, batch_size: int
) -> Results:
    """Evaluate a run on tasks: names that the harness knows, or paths of YAML files that define one.

    `max_examples` is the limit per task, None for all; `batch_size` is the number of texts scored at once.
    Raises UserError for a task that does not exist, or a run that does not generate text."""
    files = [Path(task) for task in tasks if task.endswith((".yaml", ".yml"))]
    for path in files:
        if not path.is_file():
            raise UserError(f"--tasks: no such file: {path}")
    names = [Path(task).stem if Path(task) in files else task for task in tasks]
    manager = TaskManager(include_path=[str(path.parent) for path in files] or None)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(
                f"--tasks: found {name}, expected a task of lm-evaluation-harness or the path of a YAML file"
            )
    run = run.merged()
    with jax.set_mesh(run.mesh):
        return simple_evaluate(
            model=HarnessModel(run, batch_size),
            tasks=names,
            task_manager=manager,
            limit=max_examples,
            bootstrap_iters=1000,
        )


def format_results(results: Results) -> str:
    """Format the results of `evaluate_tasks` as a table in Markdown."""
    return make_table(results)


@dataclass(frozen=True)
class ScoredText:
    """A text of which the last `count` tokens are scored."""

    tokens: list[int]
    count: int


class HarnessModel(TemplateLM):
    """A run as a model of the harness. As in `headrace generate`, texts begin with the begin-of-text token if
    they did in training."""

    def __init__(self, run: LoadedRun, batch_size: int = 8) -> None:
        super().__init__()
        recipe = run.recipe
        if not recipe.model.causal or recipe.objective.use == "classify":
            raise UserError(f"--tasks: {recipe.run_dir} does not generate text, expected a decoder")
        if run.tokenizer is None:
            raise UserError(f"--tasks: {recipe.run_dir} has no tokenizer.json")
        # Not `tokenizer`, which the base class expects to be one of transformers.
        self.run, self.text_tokenizer, self.batch_size = run, run.tokenizer, batch_size
        self.max_length = recipe.data.sequence_length  # of a text in training
        self.exec_opts = make_execution(run)
        self.model = cast_weights(run, self.exec_opts)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        special = self.text_tokenizer.special
        return special.filler if special.eos is None else special.eos

    @property
    def prefix_token_id(self) -> int:
        """The token that stands in front of a text without a context."""
        bos = self.text_tokenizer.special.bos
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Encode a text, without special tokens."""
        return self.text_tokenizer.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[EncodedPair], **kwargs: object
    ) -> list[tuple[float, bool]]:
        """Score the continuation of each request. Returns its log-likelihood, and whether each of its tokens
        is the likeliest."""
        bos = self.text_tokenizer.special.bos
        texts = []
        for _, context, continuation in requests:
            if bos is not None and context[:1] != [bos]:
                context = [bos, *context]
            tokens = (context + continuation)[-(self.max_length + 1) :]  # the last token is only predicted
            texts.append(ScoredText(tokens, min(len(continuation), len(tokens) - 1)))
        longest_first = sorted(range(len(texts)), key=lambda index: -len(texts[index].tokens))
        scores = dict(zip(longest_first, self._score([texts[index] for index in longest_first]), strict=True))
        return [scores[index] for index in range(len(texts))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, each token once and with as much context as the model can read."""
        return [self._score_rolling(text) for (text,) in (request.args for request in requests)]

    def _score_rolling(self, text: str) -> float:
        windows = get_rolling_token_windows(
            self.tok_encode(text), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
        )
        pairs = map(make_disjoint_window, windows)
        # No begin-of-text token: only the first window is the start of a text, and it has one.
        texts = [ScoredText(context + tokens, len(tokens)) for context, tokens in pairs]
        return sum(log_likelihood for log_likelihood, _ in self._score(texts))

    def _score(self, texts: list[ScoredText]) -> Iterator[tuple[float, bool]]:
        for first in range(0, len(texts), self.batch_size):
            yield from self._score_batch(texts[first : first + self.batch_size])

    def _score_batch(self, texts: list[ScoredText]) -> list[tuple[float, bool]]:
        lengths = [len(text.tokens) - 1 for text in texts]  # of the input
        width = LENGTH_MULTIPLE * math.ceil(max(*lengths, 1) / LENGTH_MULTIPLE)
        tokens, is_scored = np.zeros((2, self.batch_size, width + 1), np.int32)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            tokens[row, : length + 1] = text.tokens
            is_scored[row, length - text.count : length] = 1
        padded_lengths = np.array(lengths + [0] * (self.batch_size - len(texts)))
        segments = (np.arange(width) < padded_lengths[:, None]).astype(np.int32)
        log_likelihoods, is_greedy = score_targets(
            self.model,
            jnp.asarray(tokens[:, :-1]),
            jnp.asarray(tokens[:, 1:]),
            jnp.asarray(is_scored[:, :-1]),
            jnp.asarray(segments),
            cfg=self.run.recipe.model,
            exec_opts=self.exec_opts,
            soft_cap=self.run.recipe.loss.soft_cap,
        )
        return [(float(log_likelihoods[row]), bool(is_greedy[row])) for row in range(len(texts))]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate the continuation of each context, up to one of its stop sequences."""
        special = self.text_tokenizer.special
        stop_ids = frozenset(id for id in (special.eos, special.bos) if id is not None)
        engine = BatchEngine(self.run, slots=min(MAX_SLOTS, len(requests)), length=self.max_length)
        engine.start()
        try:
            jobs = []
            for text, options in (request.args for request in requests):
                max_tokens = min(int(options.get("max_gen_toks", 256)), self.max_length // 2)
                prompt_ids = ([] if special.bos is None else [special.bos]) + self.tok_encode(text)
                prompt_ids = prompt_ids[-(self.max_length - max_tokens) :]
                temperature = float(options.get("temperature", 0.0)) if options.get("do_sample") else 0.0
                sampling = Sampling(temperature, 0, 1.0, 0)
                until = options.get("until") or []
                job = engine.submit(prompt_ids, max_tokens, sampling, stop_ids)
                jobs.append((job, [until] if isinstance(until, str) else until))
            return [self._read_until(job, until) for job, until in jobs]
        finally:
            engine.close()

    def _read_until(self, job: GenerationJob, stop_sequences: list[str]) -> str:
        text = ""
        for piece in decode_stream(self.text_tokenizer, job.prompt_ids, iter(job)):
            text += piece
            positions = [text.index(stop) for stop in stop_sequences if stop and stop in text]
            if positions:
                job.cancel()
                return text[: min(positions)]
        return text


@functools.partial(jax.jit, static_argnames=("cfg", "exec_opts", "soft_cap"))
def score_targets(
    model: Model,
    inputs: Array,
    targets: Array,
    is_scored: Array,
    segments: Array,
    *,
    cfg: ModelConfig,
    exec_opts: Execution,
    soft_cap: float | None,
) -> tuple[Array, Array]:
    """Score the targets of rows [b s], each the token after its input.

    Returns for each row [b] the sum of the log-likelihoods of the targets that are scored, and whether each
    of these is the likeliest. The logits of all positions are never in memory at once."""
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    hidden = model(cfg, inputs, exec_opts=exec_opts, segments=segments, positions=positions)

    def score_chunk(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        hidden, targets = chunk
        logits = project(model.unembed, hidden, "bsd,vd->bsv").astype(jnp.float32)
        logits = apply_soft_cap(logits, soft_cap)
        target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return target_logits - jax.nn.logsumexp(logits, axis=-1), logits.argmax(axis=-1) == targets

    to_chunks = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, CHUNK_POSITIONS, *x.shape[2:]), 1, 0)
    from_chunks = lambda x: jnp.moveaxis(x, 0, 1).reshape(inputs.shape)
    chunk_scores = jax.lax.map(score_chunk, (to_chunks(hidden), to_chunks(targets)))
    log_likelihoods, is_likeliest = map(from_chunks, chunk_scores)
    return jnp.sum(log_likelihoods * is_scored, axis=1), jnp.all(is_likeliest | (is_scored == 0), axis=1)
