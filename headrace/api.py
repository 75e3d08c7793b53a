"""The Python API: what `import headrace` offers, and what the commands of `headrace` call.

Functions return values and raise UserError. None of them ends the process or prints, but training logs its
progress. JAX is imported by the functions that need it, after the recipe has been read and checked."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headrace.errors import ExitCode, InvalidArgument

if TYPE_CHECKING:
    import jax
    import numpy as np

    from headrace.checkpoint.open_run import LoadedRun
    from headrace.config.sections import TrainRecipe
    from headrace.data.pipeline.stages import StageName
    from headrace.plan.outcome import Outcome
    from headrace.training.evaluate import Evaluation


@dataclass(frozen=True)
class TrainResult:
    """The end of a training run."""

    exit_code: ExitCode  # DONE, PREEMPTED if a signal stopped the run, or FAILED after too many bad steps
    step: int  # of the newest checkpoint; 0 if there is none
    run_dir: str


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> "TrainRecipe":
    """Read and check the recipe of a training run.

    Args:
        path: A YAML file, or the recipe.yaml of a run folder, which may be at a gs:// URL.
        overrides: Settings that replace those of the file, as on the command line: `["schedule.steps=100"]`.

    Returns:
        The recipe with all defaults. It is immutable; `dataclasses.replace` makes variants.

    Raises:
        UserError: With file, line and key of the first mistake.

    Example:
        >>> recipe = hr.load_recipe("recipes/demo.yaml", ["schedule.steps=100"])
        >>> recipe.optimizer.learning_rate
    """
    from headrace.config import recipe

    return recipe.load_train(path, overrides)


def prepare_data(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    until: "StageName" = "shuffle",
    replace: bool = False,
    report: Callable[[str], None] | None = None,
) -> Path:
    """Prepare the data of a data recipe: normalize, tokenizer, pack, shuffle.

    Does nothing if the data is finished, and resumes where an earlier call was interrupted.

    Args:
        path: A YAML file with `sources`.
        overrides: Settings that replace those of the file: `["path=data/small"]`.
        until: The last stage to run.
        replace: Replace finished data of another recipe, or of files that have changed since.
        report: Receives lines about the progress, e.g. `print`.

    Returns:
        The folder with the data, for `Dataset.open` and for `data.path` of training recipes.

    Raises:
        UserError: If the recipe has a mistake, a source cannot be read, or the folder has other data.

    Example:
        >>> hr.prepare_data("recipes/data/demo.yaml", report=print)
        PosixPath('data/demo')
    """
    from headrace.config import recipe
    from headrace.data.pipeline.prepare import prepare

    data_recipe = recipe.load_data(path, overrides)
    prepare(data_recipe, report or (lambda line: None), until=until, replace=replace)
    return Path(data_recipe.path)


def train(
    recipe: "TrainRecipe", *, program_dir: str | Path | None = None, owns_process: bool = False
) -> TrainResult:
    """Train a model in this process, or resume the run in the recipe's `run_dir`.

    Progress is logged to the terminal and the run folder. Call it from the main thread: the first Ctrl-C
    saves a checkpoint and ends training. Only the command `headrace train` restarts after a crash.

    Args:
        recipe: From `load_recipe`.
        program_dir: Folder with the training step compiled by `headrace plan --save`, if there is one.
        owns_process: The process ends after this call: a second Ctrl-C need not wait for unfinished writes.

    Returns:
        The exit code, the step of the newest checkpoint, and the run folder.

    Raises:
        UserError: If recipe, data and devices do not match.
        DoesNotFit: If memory is too small.

    Example:
        >>> result = hr.train(hr.load_recipe("recipes/demo.yaml"))
        >>> assert result.exit_code == 0
    """
    refuse_path("recipe", recipe, "load_recipe")
    from headrace.checkpoint import inventory
    from headrace.training import run

    exit_code = run.run(recipe, Path(program_dir) if program_dir else None, owns_process=owns_process)
    step = inventory.newest_sealed_step(recipe.run_dir, default=0) or 0
    return TrainResult(exit_code, step, recipe.run_dir)


def open_run(run_dir: str | Path, overrides: Sequence[str] = (), *, ema: bool | None = None) -> "LoadedRun":
    """Load the newest checkpoint of a run, sharded over all devices.

    Args:
        run_dir: The folder of a run that was trained, imported or quantized, or its gs:// URL.
        overrides: Settings that replace those of the run's recipe: `["data.path=data/other"]`.
        ema: True for averaged weights, False for those of the last step (default: averaged if there are).

    Returns:
        The run with `recipe`, `params`, `step`, `tokenizer` and `model`.

    Raises:
        UserError: If the folder is no run, or has no such weights.

    Example:
        >>> run = hr.open_run("runs/demo")
        >>> run.step, run.recipe.model.layers
    """
    from headrace.config import recipe

    run_recipe = recipe.load_run(run_dir, overrides)
    from headrace.checkpoint import open_run

    items: dict[bool | None, Literal["params", "ema"] | None] = {True: "ema", False: "params", None: None}
    return open_run.open_run(run_recipe, item=items[ema])


def import_model(folder: str | Path, run_dir: str | Path) -> "TrainRecipe":
    """Make a run folder from a Hugging Face model folder.

    Its weights become the checkpoint of step 0, and its config.json a recipe to train from.

    Args:
        folder: A local folder with config.json, *.safetensors and tokenizer.json.
        run_dir: The run folder to write. It must not exist.

    Returns:
        The recipe. `data.path` in it is a placeholder.

    Raises:
        UserError: If Headrace does not have such a model, or the folder lacks a part of it.

    Example:
        >>> hr.import_model("models/Llama-3.2-1B", "runs/llama")
        >>> run = hr.open_run("runs/llama")
    """
    from headrace.convert import from_huggingface

    return from_huggingface.import_model(str(folder), str(run_dir))


def evaluate(run: "LoadedRun") -> "Evaluation":
    """Evaluate a model on all held-out sequences of its data.

    Args:
        run: From `open_run`. Its `recipe.data.path` is read.

    Returns:
        Metrics by name, such as `loss` in nats; also `label_lines` of a classifier. A table in notebooks.

    Raises:
        UserError: If there is no data, or it is not of the run's tokenizer or kind.

    Example:
        >>> result = hr.evaluate(hr.open_run("runs/demo"))
        >>> result["loss"], result["perplexity"]
    """
    refuse_path("run", run, "open_run")
    from headrace.training import evaluate

    return evaluate.evaluate_run(run)


def generate(
    run: "LoadedRun",
    prompt: str = "",
    *,
    tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    pause_tokens: int = 0,
    steps: int = 0,
    block: int = 0,
    order: Literal["confident", "random", "ancestral"] = "confident",
    exit_share: float = 0.0,
) -> Iterator[str]:
    """Generate text that continues a prompt.

    Args:
        run: From `open_run`: a decoder, or a model trained by objective `diffusion`.
        prompt: The text to continue.
        tokens: The maximum number of tokens.
        temperature: 0 always takes the most likely token.
        top_k: Sample from the `top_k` most likely tokens; 0 means from all.
        top_p: Sample from the most likely tokens whose probabilities add up to `top_p`.
        seed: The same seed gives the same text.
        pause_tokens: Pause tokens after the prompt, for models trained with them.
        steps: For diffusion models: the number of denoising steps; 0 means one per token.
        block: For diffusion models: the tokens to finish before the next are started; 0 means all at once.
        order: For diffusion models: unmask the most certain tokens first, random ones, or each at any step.
        exit_share: With recurrent depth: stop after a round that changes the states by less than this share.

    Returns:
        An iterator over pieces of text, without the prompt. They are generated as they are consumed.

    Raises:
        UserError: At the call, if the model cannot continue text or an argument is out of range.

    Example:
        >>> run = hr.open_run("runs/demo")
        >>> print("".join(hr.generate(run, "def ", tokens=80)))
    """
    refuse_path("run", run, "open_run")
    from headrace.inference.diffusion import UnmaskSchedule
    from headrace.inference.generate import generate
    from headrace.inference.sampling import Sampling

    schedule = UnmaskSchedule(steps, block, order)
    return generate(
        run,
        prompt,
        tokens,
        Sampling(temperature, top_k, top_p, seed),
        unmask=None if schedule == UnmaskSchedule() else schedule,
        exit_share=exit_share,
        pause_tokens=pause_tokens,
    )


def logits(run: "LoadedRun", tokens: "Sequence[int] | np.ndarray | jax.Array") -> "jax.Array":
    """Compute the logits of a model at each position.

    Args:
        run: From `open_run`.
        tokens: Token ids [s], or of several texts of one length [b s]. Each row is one document, and gets no
            begin-of-text token. Each new shape is compiled.

    Returns:
        Logits in float32 [s v] or [b s v]: of the next token for decoders, else of the token itself. Of a
        classifier [s c] or [b s c]: of the labels; a text's are at its first token.

    Raises:
        UserError: If tokens are not in the vocabulary, or the model predicts neither tokens nor labels.

    Example:
        >>> tokens = run.tokenizer.encode("def main(")
        >>> hr.logits(run, tokens)[-1].argmax()
    """
    refuse_path("run", run, "open_run")
    from headrace.inference.logits import logits

    return logits(run, tokens)


def export(
    run: "LoadedRun",
    target: str | Path,
    *,
    dtype: Literal["float32", "bfloat16", "float16", "q8_0", "q4_0"] = "float32",
    packed: bool = False,
    adapter: bool = False,
) -> list[Path]:
    """Write a model for transformers, peft or llama.cpp.

    Args:
        run: From `open_run`. LoRA adapters are merged into the model.
        target: The folder to write, or NAME.gguf for llama.cpp. It must not exist.
        dtype: Of the weights; q8_0 and q4_0 are for .gguf files.
        packed: Store ternary weights in 2 bits each.
        adapter: Write only the LoRA adapters, in float32, as peft loads them.

    Returns:
        The files that were written.

    Raises:
        UserError: If the format does not have such a model, or something exists at `target`.

    Example:
        >>> hr.export(hr.open_run("runs/demo"), "exported")
        >>> transformers.AutoModelForCausalLM.from_pretrained("exported")
    """
    refuse_path("run", run, "open_run")
    from headrace.convert.export import export_run

    return export_run(run, str(target), dtype, packed=packed, adapter=adapter)


def quantize(
    run: "LoadedRun",
    target: str | Path | None = None,
    *,
    method: str | None = None,
    bits: int | None = None,
    settings: Sequence[str] = (),
    data: str | Path | None = None,
    samples: int = 128,
    dtype: Literal["float32", "bfloat16", "float16"] = "float16",
    report: Callable[[str], None] | None = None,
) -> list[Path]:
    """Compress the weight matrices of a model to a few bits each, layer by layer.

    Finished layers are kept in a folder next to the target: an interrupted call resumes.

    Args:
        run: From `open_run`. A run trained with `qat` is stored with the bits that it was trained for.
        target: The folder to write (default: RUN-METHOD-BITS). It must not exist.
        method: `rtn`, `gptq` (default) or `vptq`.
        bits: Bits per weight (default: the method's).
        settings: Further settings of the method: `["group_size=64"]`.
        data: Packed data to calibrate on (default: the data of the run).
        samples: Sequences to calibrate on.
        dtype: Of the weights that are not quantized.
        report: Receives a line about each layer, e.g. `print`.

    Returns:
        The files that were written. The folder is a run folder, and one that transformers or vptq loads.

    Raises:
        UserError: If the model cannot be quantized, or a setting is out of range.

    Example:
        >>> hr.quantize(hr.open_run("runs/demo"), "q4", method="gptq", bits=4)
        >>> hr.evaluate(hr.open_run("q4"))
    """
    refuse_path("run", run, "open_run")
    from headrace.quantize.options import choose_method, default_target
    from headrace.quantize.run import QuantizeRequest, quantize

    config = choose_method(run.recipe, method, bits, settings)
    target = str(target or default_target(run.recipe, config))
    request = QuantizeRequest(target, config, samples, dtype, str(data or run.recipe.data.path))
    return quantize(run, request, report or (lambda line: None))


def plan(
    recipe: "TrainRecipe",
    slice_name: str,
    *,
    fast: bool = False,
    prices: str | Path | None = None,
    save_dir: str | Path | None = None,
) -> "Outcome":
    """Predict memory, speed and cost of a recipe on a TPU slice or GPUs.

    For TPUs the chip's own compiler compiles the training step, which takes a minute or two and needs libtpu,
    but no TPU. GPUs, and models far too large for the slice, are planned by arithmetic.

    Args:
        recipe: From `load_recipe`.
        slice_name: Such as `v5p-32`, `2xv5e-256` or `gpu:h200x8`.
        fast: By arithmetic only, within a second.
        prices: YAML file with prices per chip-hour, such as `v5e: {on_demand: 1.2}`.
        save_dir: Folder for the compiled training step, which `train` can load.

    Returns:
        The outcome: `fits`, `step_seconds`, `dollars` and more. A table in notebooks.

    Raises:
        UserError: If there is no such slice, or the batch does not suit it.

    Example:
        >>> outcome = hr.plan(hr.load_recipe("recipes/llama3-8b.yaml"), "v5p-32", fast=True)
        >>> outcome.fits, outcome.step_seconds, outcome.dollars
    """
    refuse_path("recipe", recipe, "load_recipe")
    from headrace.plan.planner import plan_recipe

    return plan_recipe(recipe, slice_name, fast=fast, prices=prices, save_dir=save_dir)


def refuse_path(name: str, value: object, loader: str) -> None:
    """Raise InvalidArgument for a path in place of what the function `loader` reads from it."""
    if isinstance(value, str | Path):
        raise InvalidArgument(name, f"found a path, expected hr.{loader}({str(value)!r})")
