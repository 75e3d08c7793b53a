"""Fourth stage: shuffle the packed rows into shards, one set for each epoch."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data import shuffle
from headrace.data.batch_order import SplitName
from headrace.data.pack_job import SPLITS
from headrace.data.pipeline import summary
from headrace.data.pipeline.context import PipelineContext
from headrace.data.pipeline.stages import ShuffleRecord, stage_fingerprint
from headrace.data.shards import smallest_dtype
from headrace.data.shuffle import ShuffleInput, ShuffleJob, ShufflePass
from headrace.errors import UserError

ShardResult = dict[str, Any]  # what shuffle.gather_bucket returns


class ShuffleStage:
    """Shuffles the rows in FOLDER/packed."""

    def __init__(self, context: PipelineContext) -> None:
        self.context = context

    def fingerprint(self) -> str:
        return stage_fingerprint(self.context.recipe, "shuffle")

    def is_outdated(self) -> bool:
        return False

    def run(self) -> ShuffleRecord:
        """Shuffle both splits into FOLDER/train-* and FOLDER/evaluation-*. Returns the record of the
        stage."""
        context, started_at = self.context, time.perf_counter()
        epochs = {split: self._shuffle_split(split) for split in SPLITS}
        if not epochs["train"]:
            raise UserError("sources: their weights leave no row to train on; raise one")
        quality = shuffle.combine_measures([shard["quality"] for shard in epochs["train"][0]])
        rows = sum(shard["shard"]["rows"] for shard in epochs["train"][0])
        mixing = "not measured" if quality.mixing is None else f"{quality.mixing:.3f}"
        context.report(
            f"shuffle: {len(epochs['train'])} x {rows:,} rows in {time.perf_counter() - started_at:.1f} s; "
            f"rank correlation {quality.rank_correlation:+.3f}, displacement {quality.displacement:.3f}, "
            f"mixing {mixing} (a uniform shuffle has 0, 1, 1)"
        )
        return {
            "tokens": rows * context.recipe.pack.sequence_length * len(epochs["train"]),
            "shards": {
                split: [[result["shard"] for result in epoch] for epoch in split_epochs]
                for split, split_epochs in epochs.items()
            },
            "quality": dataclasses.asdict(quality),
        }

    def _shuffle_split(self, split: SplitName) -> list[list[ShardResult]]:
        """Shuffle one split. Returns the results of its shards, by epoch."""
        passes = self._plan(split)
        epochs = []
        first_rounds = [i for i, shuffle_pass in enumerate(passes) if is_first_round(shuffle_pass)]
        for i, shuffle_pass in enumerate(passes):
            self.context.run_jobs("scatter", shuffle.scatter_input, self._scatter_jobs(shuffle_pass))
            if shuffle_pass.scatter and i == first_rounds[-1]:
                self._delete_packed(split)
            results = self.context.run_jobs("shuffle", shuffle.gather_bucket, self._gather_jobs(shuffle_pass))
            if shuffle_pass.gather[0].round.last:
                epochs.append(results)
        return epochs

    def _plan(self, split: SplitName) -> tuple[ShufflePass, ...]:
        context, recipe = self.context, self.context.recipe
        dtype = np.dtype(smallest_dtype(context.log.tokenizer["vocab"]))
        return shuffle.plan_shuffle(
            self._inputs(split),
            folder=str(context.folder),
            split=split,
            seed=recipe.seed,
            epochs=recipe.shuffle.epochs if split == "train" else 1,
            rounds=recipe.shuffle.rounds,
            row_bytes=recipe.pack.sequence_length * dtype.itemsize,
            filler=context.tokenizer.special.filler,
        )

    def _inputs(self, split: SplitName) -> list[ShuffleInput]:
        """The packed files of a split."""
        weights = [source.weight for source in self.context.recipe.sources.values()]
        groups = summary.read_groups(self.context.folder)
        label_numbers = {name: 1 + number for number, name in enumerate(summary.label_names(groups))}
        inputs = []
        for group in groups:
            packed, shard = group[split], group[split]["shard"]
            if shard is None:  # no rows
                continue
            labels: tuple[int, ...] = ()
            if ".labels" in shard["checksums"]:
                labels = (0, *(label_numbers[name] for name in group["labels"]))
            inputs.append(
                ShuffleInput(
                    f"packed/{shard['name']}",
                    packed["rows"],
                    source=group["source"],
                    weight=weights[group["source"]] if split == "train" else 1.0,
                    loss=".loss" in shard["checksums"],
                    labels=labels,
                )
            )
        return inputs

    def _scatter_jobs(self, shuffle_pass: ShufflePass) -> dict[Path, ShuffleJob]:
        """The jobs that write runs, by their result file."""
        scratch = self.context.folder / "scatter"
        return {
            scratch / f"{job.round.run(job.number).removeprefix('scatter/')}.json": job
            for job in shuffle_pass.scatter
        }

    def _gather_jobs(self, shuffle_pass: ShufflePass) -> dict[Path, ShuffleJob]:
        """The jobs that write shards, by their result file."""
        scratch = self.context.folder / "scatter"
        return {
            scratch / f"{Path(job.round.output(job.number)).name}-{job.round.number}.json": job
            for job in shuffle_pass.gather
        }

    def _delete_packed(self, split: SplitName) -> None:
        """Delete packed rows, which have been read for the last time: a third of all the disk space in
        use."""
        self.context.log.update("pack", {"spent": True})
        for file in (self.context.folder / "packed").glob(f"*-{split}*.npy"):
            file.unlink()


def is_first_round(shuffle_pass: ShufflePass) -> bool:
    """Whether the pass reads the packed rows, not the output of an earlier round."""
    return shuffle_pass.gather[0].round.number == 0
