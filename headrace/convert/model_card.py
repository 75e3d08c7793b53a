"""Model cards: the README.md of an exported model, written from the run folder, with a chart of its losses.

What the run folder cannot know (license, intended use, limitations) is marked for the author to add."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader, run_length
from headrace.data.memory_map import open_folder
from headrace.data.shards import Index
from headrace.errors import UserError
from headrace.model_formats import quantized_folder, vptq
from headrace.model_formats.hf_config import HFSettings
from headrace.model_wrappers import qat
from headrace.report import charts, facts
from headrace.report.charts import Curve
from headrace.report.facts import Facts
from headrace.storage import redact
from headrace.trackers.terminal import format_duration

CHART_NAME = "loss.svg"
WIDTH, HEIGHT = 640, 260  # of the chart
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 14, 30  # its margins, which have room for labels
COLORS = ("#3b6fb6", "#c9622f")


@dataclass(frozen=True)
class ModelCardKind:
    """A kind of model: its names for the Hugging Face Hub and for transformers, and its use in words."""

    pipeline_tag: str
    auto_class: str
    verb_phrase: str


KINDS = {  # by the end of the name of transformers' class
    "ForCausalLM": ModelCardKind("text-generation", "AutoModelForCausalLM", "generates text"),
    "ForMaskedLM": ModelCardKind("fill-mask", "AutoModelForMaskedLM", "predicts masked tokens"),
    "ForSequenceClassification": ModelCardKind(
        "text-classification", "AutoModelForSequenceClassification", "classifies texts"
    ),
    "ForTokenClassification": ModelCardKind(
        "token-classification", "AutoModelForTokenClassification", "classifies every token of a text"
    ),
}
OTHER_KIND = ModelCardKind("feature-extraction", "AutoModel", "computes hidden states")


def write_card(run: LoadedRun, settings: HFSettings, folder: Path, quantized_by: str | None = None) -> None:
    """Write README.md and the chart of losses to the folder of an exported model.

    `settings` are those of its config.json. `quantized_by` is the method of `headrace quantize`, if it made
    the folder."""
    run_facts: Facts | None = None
    with contextlib.suppress(UserError, OSError):  # an imported model has no history
        run_facts = facts.read_facts(run.recipe.run_dir)
    chart = draw_loss_curve_svg(run_facts) if run_facts is not None else ""
    if chart:
        (folder / CHART_NAME).write_text(chart)
    title = folder.name if is_quantized_copy(settings) else run_name(run)
    sections = [
        front_matter(run, settings),
        intro(run, settings, title),
        usage(settings),
        data_section(run),
        training_section(run, run_facts, has_chart=bool(chart)),
        evaluation_section(run, settings, run_facts),
        quantization_section(run, settings, run_facts, quantized_by),
        recipe_section(run),
    ]
    text = "\n\n".join(section for section in sections if section)
    (folder / "README.md").write_text(redact.redact(text) + "\n")


def model_kind(settings: HFSettings) -> ModelCardKind:
    """Find the kind of a model by the class that its config.json names."""
    (architecture, *_) = settings.get("architectures") or [""]
    return next((kind for suffix, kind in KINDS.items() if architecture.endswith(suffix)), OTHER_KIND)


def quantization_format(settings: HFSettings) -> str | None:
    """The `quant_method` of a config.json; None if its weights are not quantized."""
    config = settings.get("quantization_config")
    return None if config is None else config["quant_method"]


def is_quantized_copy(settings: HFSettings) -> bool:
    """Whether `headrace quantize` made the model from a run in another folder. Packed ternary matrices are
    those of the run itself."""
    return quantization_format(settings) in quantized_folder.FORMATS


def is_quantization_aware(run_facts: Facts | None) -> bool:
    """Whether the run was trained with quantized weights."""
    return run_facts is not None and run_facts.recipe is not None and qat.applies(run_facts.recipe.model)


def run_name(run: LoadedRun) -> str:
    """The last part of the path of the run folder."""
    return Path(run.recipe.run_dir.rstrip("/")).name


def front_matter(run: LoadedRun, settings: HFSettings) -> str:
    """The YAML that the Hugging Face Hub reads, between dashes."""
    tags = ["headrace", run.recipe.model.use, *(["quantized"] if "quantization_config" in settings else [])]
    library = "headrace" if quantization_format(settings) == "vptq" else "transformers"
    lines = [
        f"library_name: {library}",
        f"pipeline_tag: {model_kind(settings).pipeline_tag}",
        f"tags: {json.dumps(tags)}",
    ]
    return "\n".join(["---", *lines, "# license: to be added", "---"])


def intro(run: LoadedRun, settings: HFSettings, title: str) -> str:
    """The title, and a paragraph on what the model is and how long it was trained."""
    recipe = run.recipe
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    kind = model_kind(settings)
    text = f"This model (`{recipe.model.use}`, {parameters:,} parameters) {kind.verb_phrase}."
    if run.step:
        tokens = run_length.tokens_until(recipe, run.step)
        start = f", starting from the weights of `{recipe.init_from}`" if recipe.init_from else ""
        text += f" It was trained for {run.step:,} steps, {tokens:,} tokens{start}."
    to_add = "<!-- To be added by the author: intended use, limitations, contact. -->"
    return "\n\n".join([f"# {title}", f"{text} Made with Headrace.", to_add])


def usage(settings: HFSettings) -> str:
    """The section that shows how to load the model."""
    kind, requirements = model_kind(settings), ""
    if quantization_format(settings) == "vptq":
        # transformers 5.22 looks up the quantized modules by names that they do not have.
        command = "generate" if kind.pipeline_tag == "text-generation" else "eval"
        return (
            f"## Usage\n\n```\nheadrace {command} FOLDER\n```\n\n"
            "The matrices are stored in the format of the vptq package. transformers cannot load this folder."
        )
    if quantization_format(settings) == "gptq":
        requirements = "Requires GPTQModel: `pip install transformers optimum gptqmodel`.\n\n"
    return (
        f"## Usage\n\n{requirements}```python\n"
        f"from transformers import {kind.auto_class}, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        f'model = {kind.auto_class}.from_pretrained("FOLDER")\n'
        "```"
    )


def data_section(run: LoadedRun) -> str:
    """The section on the training data: sources and sizes, if the folder can still be read."""
    path = run.recipe.data.path
    try:
        index = Index.parse(bytes(open_folder(path).read("index.json")), path)
    except (UserError, OSError):
        return f"## Data\n\n`{path}`, in sequences of {run.recipe.data.sequence_length:,} tokens."
    sources = index.recipe.get("sources", {}).items()
    weights = ", ".join(f"{name} (weight {(keys or {}).get('weight', 1.0):g})" for name, keys in sources)
    rows = [
        (name, f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}")
        for name, split in index.splits.items()
    ]
    paragraphs = [
        "## Data",
        f"Sources: {weights}. Vocabulary: {index.vocab:,} tokens.",
        markdown_table(("split", "documents", "tokens", "bytes of text"), rows),
    ]
    if index.labels:
        paragraphs.append(f"Labels: {', '.join(index.labels)}.")
    return "\n\n".join(paragraphs)


def training_section(run: LoadedRun, run_facts: Facts | None, *, has_chart: bool) -> str:
    """The section on training: main settings, hardware, time and cost, final loss, and the chart."""
    recipe = run.recipe
    optimizer, compute = recipe.optimizer, recipe.compute
    rows = {
        "objective": recipe.objective.use,
        "batch": f"{recipe.batch.sequences:,} sequences of {recipe.data.sequence_length:,} tokens",
        "optimizer": f"{optimizer.use}, learning rate {optimizer.learning_rate:g}, "
        f"weight decay {optimizer.weight_decay:g}, {recipe.schedule.use} schedule",
        "precision": compute.dtype if compute.matmul == "compute" else compute.matmul,
    }
    if run_facts is not None and run_facts.totals.attempts:
        totals = run_facts.totals
        attempt = totals.attempts[-1]
        rows["hardware"] = f"{attempt.devices} x {attempt.kind}"
        rows["time"] = f"{format_duration(totals.total)}, {100 * totals.share:.1f} % of it training (goodput)"
        rows["restarts"] = str(len(totals.attempts) - 1)
        cost = facts.compute_cost(run_facts)
        if cost is not None and cost.on_demand is not None:
            rows["cost"] = "about ${:,.2f} to ${:,.2f} at on-demand list prices".format(*cost.on_demand)
    if run_facts is not None and run_facts.rows:
        rows["final loss"] = f"{run_facts.rows[-1]['loss']:.4f} at step {run_facts.step:,}"
    chart = f"\n\n![training and evaluation loss]({CHART_NAME})" if has_chart else ""
    return "## Training\n\n" + markdown_table(("", ""), list(rows.items())) + chart


def evaluation_section(run: LoadedRun, settings: HFSettings, run_facts: Facts | None) -> str:
    """The section with the last evaluation during training. Empty if there was none."""
    if run_facts is None or not run_facts.evaluations:
        return ""
    row = run_facts.evaluations[-1]
    metrics = {
        name.removeprefix("evaluate/").replace("_", " "): f"{value:.4f}"
        for name, value in row.items()
        if name.startswith("evaluate/") and isinstance(value, int | float)
    }
    text = f"Measured on held-out data at step {row['step']:,}."
    if is_quantized_copy(settings):
        text = f"Measured on held-out data for `{run_name(run)}` at step {row['step']:,}"
        if is_quantization_aware(run_facts):
            text += ", with its matrices quantized as they are stored here."
        else:
            data = " data.path=TEXT" if run.recipe.objective.use == "dpo" else ""
            text += f", before quantization. `headrace eval FOLDER{data}` evaluates the quantized model."
    return f"## Evaluation\n\n{text}\n\n" + markdown_table(("metric", "value"), list(metrics.items()))


def quantization_section(
    run: LoadedRun, settings: HFSettings, run_facts: Facts | None, quantized_by: str | None
) -> str:
    """The section on how the weights are quantized. Empty if they are not."""
    config, format_name = settings.get("quantization_config"), quantization_format(settings)
    if config is None:
        return ""
    if format_name == "gptq":
        group = config["group_size"]
        per = f"per group of {group} inputs of an output" if group > 0 else "per output"
        stored = f"in GPTQ's format, {config['bits']} bits per weight and a scale {per}"
    elif format_name == "vptq":
        shapes = [vptq.read_shape(layer) for layer in config["config_for_layers"].values()]
        bits = sum(shape.stored_bits for shape in shapes) / sum(
            shape.inputs * shape.outputs for shape in shapes
        )
        lengths = " or ".join(str(length) for length in sorted({shape.vector_length for shape in shapes}))
        stored = f"in VPTQ's format: vectors of {lengths} weights, {bits:.2f} bits per weight with codebooks"
    else:
        stored = "in BitNet's format, ternary, 2 bits per weight"
    text = f"## Quantization\n\nThe matrices of the layers are stored {stored}."
    if is_quantized_copy(settings):
        source, dtype = run_name(run), settings["dtype"]
        when = "during training" if is_quantization_aware(run_facts) else f"after training, by {quantized_by}"
        text += f" Those of `{source}` were quantized {when}. The other weights are stored in {dtype}."
    return text


def recipe_section(run: LoadedRun) -> str:
    """The section with the full recipe, collapsed."""
    text = reader.to_yaml(run.recipe).rstrip()
    return f"## Recipe\n\n<details><summary>All settings</summary>\n\n```yaml\n{text}\n```\n\n</details>"


def markdown_table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Format rows as a table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw_loss_curve_svg(run_facts: Facts) -> str:
    """Draw the training and evaluation losses over steps as SVG. Empty if there are fewer than two points."""
    curves = [
        Curve("training", [(row["step"], row["loss"]) for row in run_facts.rows]),
        Curve("evaluation", [(row["step"], row["evaluate/loss"]) for row in run_facts.evaluations]),
    ]
    binned = [(curve.name, bins) for curve in curves if (bins := charts.bin_points(curve.points))]
    if not binned or len(binned[0][1]) < 2:
        return ""
    last_step = max(bin_.x for _, bins in binned for bin_ in bins)
    low, high = charts.value_range([bins for _, bins in binned], from_zero=False)
    levels = charts.round_ticks(low, high)
    low, high = min(low, levels[0]), max(high, levels[-1])
    to_x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / last_step
    to_y = lambda loss: TOP + (HEIGHT - BOTTOM - TOP) * (1 - (min(loss, high) - low) / (high - low))
    label = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
    shapes = []
    for loss in levels:
        shapes.append(f'<path d="M{LEFT} {to_y(loss):.1f}H{WIDTH - RIGHT}" stroke="#8884"/>')
        shapes.append(label.format(LEFT - 8, to_y(loss) + 4, "end", charts.strip_zeros(f"{loss:.4f}")))
    shapes += [
        label.format(to_x(step), HEIGHT - 8, "middle", f"{step:,.0f}")
        for step in charts.round_ticks(0, last_step)
        if step <= last_step
    ]
    for index, ((name, bins), color) in enumerate(zip(binned, COLORS, strict=False)):
        points = [(to_x(bin_.x), to_y(bin_.mean)) for bin_ in bins]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        if name == "evaluation":  # few points, or only one, of which no line is visible
            shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
        shapes.append(
            f'<text x="{WIDTH - 16}" y="{26 + 18 * index}" text-anchor="end" fill="{color}">{name}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="#888">'
        f"<title>loss over steps</title>{''.join(shapes)}</svg>\n"
    )
