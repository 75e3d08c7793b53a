"""Sums over packed data: the index, and the numbers on the report page."""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.config.reader import to_dict
from headrace.config.sections import DataRecipe
from headrace.data import annotations
from headrace.data.batch_order import SplitName
from headrace.data.pack_job import SPLITS, GroupSummary, SplitSummary
from headrace.data.pipeline.stages import StageLog
from headrace.data.shards import Index, Shard, Split, smallest_dtype
from headrace.data.tokenizer import tokenizer as tokenizer_io


@dataclass(frozen=True)
class PackTotals:
    """Sizes of all packed groups together, each document once."""

    documents: int
    tokens: int
    bytes: int
    rows: int
    evaluation_rows: int

    @classmethod
    def of(cls, groups: Sequence[GroupSummary]) -> "PackTotals":
        """Add up the sizes of groups."""
        splits = [group[split] for group in groups for split in SPLITS]
        return cls(
            documents=sum(split["documents"] for split in splits),
            tokens=sum(split["tokens"] for split in splits),
            bytes=sum(split["bytes"] for split in splits),
            rows=sum(split["rows"] for split in splits),
            evaluation_rows=sum(group["evaluation"]["rows"] for group in groups),
        )


def read_groups(folder: Path) -> list[GroupSummary]:
    """Read the summaries of all groups in FOLDER/packed, in order."""
    files = sorted((folder / "packed").glob("*.json"), key=lambda file: int(file.stem))
    return [group for file in files for group in json.loads(file.read_bytes())["groups"]]


def read_token_counts(folder: Path) -> np.ndarray:
    """Count how often each token id occurs in the training rows of FOLDER/packed, [vocab]."""
    return sum(
        (np.load(file) for file in sorted((folder / "packed").glob("*.counts.npy"))), start=np.zeros((), int)
    )


def make_index(
    recipe: DataRecipe,
    tokenizer: tokenizer_io.Tokenizer,
    log: StageLog,
    groups: Sequence[GroupSummary],
    counts: np.ndarray,
) -> Index:
    """The index of shuffled data. `counts` is how often each token id occurs."""
    splits = {}
    for split in SPLITS:
        shards = log.shuffle["shards"][split]
        epochs = tuple(tuple(Shard(**shard) for shard in epoch) for epoch in shards)
        rows = sum(shard.rows for shard in epochs[0]) if epochs else 0
        documents = sum(group[split]["documents"] for group in groups)
        tokens, size = (weighted_sum(recipe, split, groups, key) for key in WEIGHTED)
        splits[split] = Split(rows, documents, tokens, size, epochs)
    kinds = set(log.pack["kinds"])
    return Index(
        sequence_length=recipe.pack.sequence_length,
        dtype=smallest_dtype(tokenizer.vocab_size),
        vocab=tokenizer.vocab_size,
        special=tokenizer.special,
        tokenizer_sha256=tokenizer_io.file_sha256(recipe.path),
        unigram_entropy=entropy(counts),
        sources=tuple(recipe.sources),
        splits={str(split): sizes for split, sizes in splits.items()},
        recipe=to_dict(recipe),
        inputs={"sources": log.normalize["units"], "tokenizer": log.tokenizer["brought"]},
        labels=label_names(groups),
        labelled=annotations.find_labeled_unit(kinds),
        pairs=annotations.PAIR in kinds,
    )


def label_names(groups: Iterable[GroupSummary]) -> tuple[str, ...]:
    """The labels of all groups, in the order of their numbers in the index."""
    return annotations.sort_labels(name for group in groups for name in group["labels"])


def count_labels(groups: Sequence[GroupSummary]) -> dict[str, dict[str, int]]:
    """Count the texts or tokens with each label, by split and label."""
    counts: dict[str, dict[str, int]] = {}
    for split in SPLITS:
        counts[split] = dict.fromkeys(label_names(groups), 0)
        for group in groups:
            for name, count in zip(group["labels"], group[split]["labels"], strict=True):
                counts[split][name] += count
    return counts


WEIGHTED: tuple[Literal["tokens", "bytes"], ...] = ("tokens", "bytes")


def weighted_sum(
    recipe: DataRecipe,
    split: SplitName,
    groups: Sequence[GroupSummary],
    key: Literal["tokens", "bytes"],
) -> int:
    """Sum over one epoch. Training data counts as often as the weight of its source says."""
    weights = [source.weight if split == "train" else 1.0 for source in recipe.sources.values()]
    return round(sum(group[split][key] * weights[group["source"]] for group in groups))


def make_stats(
    recipe: DataRecipe, log: StageLog, groups: Sequence[GroupSummary], counts: np.ndarray
) -> dict[str, Any]:
    """The numbers on the report page that are not in the index, by the keys that report.py describes."""
    splits = [(group["source"], group[split]) for group in groups for split in SPLITS]
    length_counts = [
        sum(column)
        for column in itertools.zip_longest(*(split["lengths"] for _, split in splits), fillvalue=0)
    ]
    fills = np.sum([split["fills"] for _, split in splits], axis=0)
    problems = [record["problems"] for record in log.records.values() if "problems" in record]
    return {
        "stages": {
            name: {key: record[key] for key in ("seconds", "bytes", "tokens") if key in record}
            for name, record in log.records.items()
        },
        "sources": {
            name: {"weight": section.weight}
            | sum_sizes([split for source, split in splits if source == number])
            for number, (name, section) in enumerate(recipe.sources.items())
        },
        "dropped": log.normalize["dropped"],
        "problems": {
            "counts": sum_counts(part["counts"] for part in problems),
            "samples": [sample for part in problems for sample in part["samples"]],
        },
        "lengths": {
            "edges": [2**power for power in range(len(length_counts) + 1)],
            "counts": length_counts,
        },
        "fill": {"edges": np.linspace(0, 1, len(fills) + 1).tolist(), "counts": fills.tolist()},
        "vocabulary": counts,
        "shuffle": log.shuffle["quality"],
        "labels": count_labels(groups),
    }


def sum_sizes(splits: Sequence[SplitSummary]) -> dict[str, int]:
    """Add up documents, bytes, tokens and rows."""
    return {
        "documents": sum(split["documents"] for split in splits),
        "bytes": sum(split["bytes"] for split in splits),
        "tokens": sum(split["tokens"] for split in splits),
        "rows": sum(split["rows"] for split in splits),
    }


def entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution with these counts."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Add up counts by key. The keys of the result are sorted."""
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(sorted(total.items()))


def format_counts(verb: str, counts: dict[str, int]) -> str:
    """Format counts for the end of a line, as in "; dropped 3 (too short 2, too long 1)". Empty without
    any."""
    listing = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"; {verb} {sum(counts.values()):,} ({listing})" if counts else ""
