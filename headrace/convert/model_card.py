"""The model card: README.md beside the weights, written from what the run folder knows, with its curve. What
only people know (licence, purpose, limits) is left to them, and marked."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from headrace.checkpoint.open_run import LoadedRun
from headrace.config import reader, run_length
from headrace.data.memory_map import open_folder
from headrace.data.shards import Index
from headrace.errors import UserError
from headrace.model_formats import quantized_folder, vptq
from headrace.model_wrappers import qat
from headrace.report import charts, facts
from headrace.report.charts import Curve
from headrace.report.facts import Facts
from headrace.storage import redact
from headrace.trackers.terminal import format_duration

CURVE = "loss.svg"
WIDE, HIGH, LEFT, BELOW = 640, 260, 52, 30  # of the drawing, and the room for its labels
COLOURS = ("#3b6fb6", "#c9622f")


@dataclass(frozen=True)
class ModelCardKind:
    """What the hub and transformers call a model that does this."""

    task: str
    loads: str
    does: str


KINDS = {
    "ForCausalLM": ModelCardKind("text-generation", "AutoModelForCausalLM", "continues text"),
    "ForMaskedLM": ModelCardKind("fill-mask", "AutoModelForMaskedLM", "tells masked tokens"),
    "ForSequenceClassification": ModelCardKind(
        "text-classification", "AutoModelForSequenceClassification", "tells the label of a text"
    ),
    "ForTokenClassification": ModelCardKind(
        "token-classification", "AutoModelForTokenClassification", "tells the label of each word"
    ),
}
OTHER = ModelCardKind("feature-extraction", "AutoModel", "gives hidden states")


def write(run: LoadedRun, settings: dict[str, Any], target: Path, method: str | None = None) -> None:
    """`settings` are those of config.json, `method` is one of headrace/quantize/methods."""
    known: Facts | None = None
    with contextlib.suppress(UserError, OSError):  # an import has no history
        known = facts.read_facts(run.recipe.run_dir)
    curve = loss_curve(known) if known is not None else ""
    if curve:
        (target / CURVE).write_text(curve)
    title = target.name if is_rounded(settings) else source_of(run)
    parts = [front_matter(run, settings), intro(run, settings, title), usage(settings)]
    parts += [data(run), training(run, known, has_curve=bool(curve)), evaluation(run, settings, known)]
    parts += [quantised(run, settings, known, method), whole_recipe(run)]
    (target / "README.md").write_text(redact.redact("\n\n".join(part for part in parts if part)) + "\n")


def kind(settings: dict[str, Any]) -> ModelCardKind:
    (name, *_) = settings.get("architectures") or [""]
    return next((found for ending, found in KINDS.items() if name.endswith(ending)), OTHER)


def layout(settings: dict[str, Any]) -> str | None:
    """How matrices are stored that take a few bits a weight."""
    how = settings.get("quantization_config")
    return None if how is None else how["quant_method"]


def is_rounded(settings: dict[str, Any]) -> bool:
    """Whether `headrace quantize` made it, of a run that is another folder. Ternary matrices are packed as
    training has them."""
    return layout(settings) in quantized_folder.READ


def is_learnt(known: Facts | None) -> bool:
    """Whether training saw its matrices in few bits already."""
    return known is not None and known.recipe is not None and qat.applies(known.recipe.model)


def source_of(run: LoadedRun) -> str:
    return Path(run.recipe.run_dir.rstrip("/")).name


def front_matter(run: LoadedRun, settings: dict[str, Any]) -> str:
    tags = ["headrace", run.recipe.model.use, *(["quantized"] if "quantization_config" in settings else [])]
    lines = [
        f"library_name: {'headrace' if layout(settings) == 'vptq' else 'transformers'}",
        f"pipeline_tag: {kind(settings).task}",
        f"tags: {json.dumps(tags)}",
    ]
    return "\n".join(["---", *lines, "# license: the one you give it", "---"])


def intro(run: LoadedRun, settings: dict[str, Any], title: str) -> str:
    size = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    cfg = run.recipe
    start = f", begun with the weights of `{cfg.init_from}`" if cfg.init_from else ""
    seen = run_length.tokens_until(cfg, run.step)
    learnt = f" It was trained for {run.step:,} steps, {seen:,} tokens{start}." if run.step else ""
    what = (
        f"A {cfg.model.use} with {size:,} parameters that {kind(settings).does}.{learnt} Made with Headrace."
    )
    yours = "<!-- What it is for, what it is not, and who answers questions: yours to say. -->"
    return "\n\n".join([f"# {title}", what, yours])


def usage(settings: dict[str, Any]) -> str:
    loads, packages = kind(settings).loads, ""
    if layout(settings) == "vptq":  # transformers 5.22 looks its modules up under names they have not
        does = "generate" if kind(settings).task == "text-generation" else "eval"
        return (
            f"## Use\n\n```\nheadrace {does} FOLDER\n```\n\nThe matrices are as the package vptq reads them; "
            "transformers does not load this folder."
        )
    if layout(settings) == "gptq":
        packages = "With GPTQModel: `pip install transformers optimum gptqmodel`.\n\n"
    return (
        f"## Use\n\n{packages}```python\n"
        f"from transformers import {loads}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\nmodel = {loads}.from_pretrained("FOLDER")\n'
        "```"
    )


def data(run: LoadedRun) -> str:
    """By the index of the data, where it can still be read."""
    path, said = run.recipe.data.path, "## Data\n\n"
    try:
        index = Index.parse(bytes(open_folder(path).read("index.json")), path)
    except (UserError, OSError):
        return f"{said}`{path}`, in rows of {run.recipe.data.sequence_length:,} tokens."
    weights = {name: (one or {}).get("weight", 1.0) for name, one in index.recipe.get("sources", {}).items()}
    rows = ["| split | documents | tokens | bytes of text |", "|---|---|---|---|"]
    rows += [
        f"| {name} | {split.documents:,} | {split.tokens:,} | {split.bytes:,} |"
        for name, split in index.splits.items()
    ]
    sources = ", ".join(f"{name} (x {weight:g})" for name, weight in weights.items())
    lines = [f"{said}Sources: {sources}. A vocabulary of {index.vocab:,} tokens.", "\n".join(rows)]
    if index.labels:
        lines.append(f"Labels: {', '.join(index.labels)}.")
    return "\n\n".join(lines)


def training(run: LoadedRun, known: Facts | None, *, has_curve: bool) -> str:
    cfg = run.recipe
    told = {
        "objective": cfg.objective.use,
        "batch": f"{cfg.batch.sequences:,} x {cfg.data.sequence_length:,} tokens",
        "optimizer": f"{cfg.optimizer.use}, learning rate {cfg.optimizer.learning_rate:g}, "
        f"weight decay {cfg.optimizer.weight_decay:g}, {cfg.schedule.use} schedule",
        "precision": cfg.compute.dtype if cfg.compute.matmul == "compute" else cfg.compute.matmul,
    }
    if known is not None and known.totals.attempts:
        life, account = known.totals.attempts[-1], known.totals
        told["hardware"] = f"{life.devices} x {life.kind}"
        told["time"] = (
            f"{format_duration(account.total)}, of which {100 * account.share:.1f} % trained (goodput)"
        )
        told["restarts"] = str(len(account.attempts) - 1)
        spent = facts.compute_cost(known)
        if spent is not None and spent.on_demand is not None:
            told["cost"] = "about ${:,.2f} to ${:,.2f} at list prices on demand".format(*spent.on_demand)
    if known is not None and known.rows:
        told["last loss"] = f"{known.rows[-1]['loss']:.4f} at step {known.step:,}"
    rows = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in told.items())]
    picture = f"\n\n![loss]({CURVE})" if has_curve else ""
    return "## Training\n\n" + "\n".join(rows) + picture


def evaluation(run: LoadedRun, settings: dict[str, Any], known: Facts | None) -> str:
    if known is None or not known.evaluations:
        return ""
    row = known.evaluations[-1]
    told = {name.removeprefix("evaluate/"): row[name] for name in row if name.startswith("evaluate/")}
    numbers = {name: value for name, value in told.items() if isinstance(value, int | float)}
    rows = ["| held out | |", "|---|---|"]
    rows += [f"| {name.replace('_', ' ')} | {value:.4f} |" for name, value in numbers.items()]
    whose = f"At step {row['step']:,}."
    if is_rounded(settings) and is_learnt(known):
        whose = f"{whose[:-1]} of `{source_of(run)}`, whose matrices were rounded as they are stored here."
    elif is_rounded(settings):
        text = " data.path=TEXT" if run.recipe.objective.use == "dpo" else ""
        whose = (
            f"Of `{source_of(run)}` at step {row['step']:,}, before quantisation. "
            f"`headrace eval FOLDER{text}` measures the quantised model."
        )
    return f"## Evaluation\n\n{whose}\n\n" + "\n".join(rows)


def quantised(run: LoadedRun, settings: dict[str, Any], known: Facts | None, method: str | None) -> str:
    how, which = settings.get("quantization_config"), layout(settings)
    if how is None:
        return ""
    if which == "gptq":
        group = how["group_size"]
        shared = f"each {group} inputs of an output" if group > 0 else "each output"
        said = f"GPTQ's layout, {how['bits']} bits a weight and a scale for {shared}"
    elif which == "vptq":
        sizes = [vptq.read_sizes(one) for one in how["config_for_layers"].values()]
        bits = sum(one.bits for one in sizes) / sum(one.inputs * one.outputs for one in sizes)
        each = " or ".join(str(vector) for vector in sorted({one.vector for one in sizes}))
        said = f"VPTQ's layout: vectors of {each} weights, {bits:.2f} bits a weight with their codebooks"
    else:
        said = "BitNet's layout, ternary, 2 bits a weight"
    lines = [f"## Quantisation\n\nThe matrices of the layers are in {said}."]
    if is_rounded(settings):
        when = "in its training" if is_learnt(known) else f"by {method} after its training"
        lines.append(
            f"Those of `{source_of(run)}` were rounded {when}; the other weights are in {settings['dtype']}."
        )
    return " ".join(lines)


def whole_recipe(run: LoadedRun) -> str:
    text = reader.to_yaml(run.recipe).rstrip()
    return f"## Recipe\n\n<details><summary>All settings</summary>\n\n```yaml\n{text}\n```\n\n</details>"


def loss_curve(known: Facts) -> str:
    """The losses over steps; nothing where there are none."""
    curves = [
        Curve("training", [(row["step"], row["loss"]) for row in known.rows]),
        Curve("held out", [(row["step"], row["evaluate/loss"]) for row in known.evaluations]),
    ]
    binned = [(curve.name, bins) for curve in curves if (bins := charts.bin_points(curve.points))]
    if not binned or len(binned[0][1]) < 2:
        return ""
    last = max(one.x for _, bins in binned for one in bins)
    low, high = charts.value_range([bins for _, bins in binned], from_zero=False)
    levels = charts.round_ticks(low, high)
    low, high = min(low, levels[0]), max(high, levels[-1])
    across = lambda x: LEFT + (WIDE - LEFT - 12) * x / last
    up = lambda y: 14 + (HIGH - BELOW - 14) * (1 - (min(y, high) - low) / (high - low))
    text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>'
    shapes = []
    for y in levels:
        shapes.append(f'<path d="M{LEFT} {up(y):.1f}H{WIDE - 12}" stroke="#8884"/>')
        shapes.append(text.format(LEFT - 8, up(y) + 4, "end", charts.strip_zeros(f"{y:.4f}")))
    for x in (x for x in charts.round_ticks(0, last) if x <= last):
        shapes.append(text.format(across(x), HIGH - 8, "middle", f"{x:,.0f}"))
    for number, (name, bins) in enumerate(binned):
        line = " ".join(f"{across(one.x):.1f},{up(one.mean):.1f}" for one in bins)
        colour = COLOURS[number]
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if name == "held out":  # few, and at times one alone
            dot = '<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'
            shapes += [dot.format(across(one.x), up(one.mean), colour) for one in bins]
        shapes.append(
            f'<text x="{WIDE - 16}" y="{26 + 18 * number}" text-anchor="end" fill="{colour}">{name}</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}" '
        'font-family="sans-serif" font-size="12" fill="#888"><title>loss over steps</title>'
        + "".join(shapes)
        + "</svg>\n"
    )
