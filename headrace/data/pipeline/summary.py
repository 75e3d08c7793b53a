"""What is told of data once it is made: the index, and the numbers on its page."""

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from headrace.config.reader import to_dict
from headrace.data import annotations, pack_job as groups
from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.shards import Index, Shard, Split, smallest_dtype

Packed = list[dict[str, Any]]  # what groups.pack_group said of its work, of each group


def index(
    recipe: Any,
    tokenizer: tokenise.Tokenizer,
    shards: dict[str, Any],
    packed: Packed,
    counts: np.ndarray,
    *,
    inputs: dict[str, str],
    kinds: set[str],
) -> Index:
    splits = {}
    for name, sets in shards.items():
        epochs = tuple(tuple(Shard(**shard) for shard in epoch) for epoch in sets)
        documents = sum(one[name]["documents"] for one in packed)
        tokens, size = (weighted(recipe, name, packed, key) for key in ("tokens", "bytes"))
        rows = sum(shard.rows for shard in epochs[0]) if epochs else 0
        splits[name] = Split(rows, documents, tokens, size, epochs)
    return Index(
        sequence_length=recipe.pack.sequence_length,
        dtype=smallest_dtype(tokenizer.vocab),
        vocab=tokenizer.vocab,
        special=tokenizer.special,
        tokenizer_sha256=tokenise.sha256(recipe.path),
        unigram_entropy=entropy(counts),
        sources=tuple(recipe.sources),
        splits=splits,
        recipe=to_dict(recipe),
        inputs=inputs,
        labels=labels(packed),
        labelled=annotations.labelled(kinds),
        pairs=annotations.PAIR in kinds,
    )


def labels(packed: Packed) -> tuple[str, ...]:
    """Of all groups together, in the order of their numbers."""
    return annotations.ordered(name for one in packed for name in one["labels"])


def label_counts(packed: Packed) -> dict[str, dict[str, int]]:
    """By split and label, how many texts or tokens have it."""
    counts = {split: dict.fromkeys(labels(packed), 0) for split in groups.SPLITS}
    for one in packed:
        for split, of in counts.items():
            for name, number in zip(one["labels"], one[split]["labels"], strict=True):
                of[name] += number
    return counts


def weighted(recipe: Any, split: str, packed: Packed, key: str) -> int:
    """A sum over one epoch, in which training data comes as often as its source's weight says."""
    weights = [source.weight if split == "train" else 1.0 for source in recipe.sources.values()]
    return round(sum(one[split][key] * weights[one["source"]] for one in packed))


def stats(recipe: Any, stages: dict[str, Any], packed: Packed, counts: np.ndarray) -> dict[str, Any]:
    """What the page about the data shows beside the index."""
    parts = [(one["source"], one[split]) for one in packed for split in groups.SPLITS]
    lengths = [
        sum(sizes) for sizes in itertools.zip_longest(*(part["lengths"] for _, part in parts), fillvalue=0)
    ]
    fills = np.sum([part["fills"] for _, part in parts], axis=0)
    told = ("seconds", "bytes", "tokens")
    met = [stage["problems"] for stage in stages.values() if "problems" in stage]
    return {
        "stages": {name: {key: stage[key] for key in told if key in stage} for name, stage in stages.items()},
        "sources": {
            name: {"weight": cfg.weight} | sums([part for source, part in parts if source == number])
            for number, (name, cfg) in enumerate(recipe.sources.items())
        },
        "dropped": stages["normalize"]["dropped"],
        "problems": {
            "counts": total(problems["counts"] for problems in met),
            "samples": [place for problems in met for place in problems["samples"]],
        },
        "lengths": {"edges": [2**power for power in range(len(lengths) + 1)], "counts": lengths},
        "fill": {"edges": np.linspace(0, 1, len(fills) + 1).tolist(), "counts": fills.tolist()},
        "vocabulary": counts,
        "shuffle": stages["shuffle"]["quality"],
        "labels": label_counts(packed),
    }


def sums(parts: Packed) -> dict[str, int]:
    return {key: sum(part[key] for part in parts) for key in ("documents", "bytes", "tokens", "rows")}


def entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    added: Counter[str] = Counter()
    for one in counts:
        added.update(one)
    return dict(sorted(added.items()))


def told(what: str, counts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"; {what} {sum(counts.values()):,} ({listed})" if counts else ""
