"""The pipeline of data preparation: its four stages in order, then the index and the report page."""

import shutil
import time
from pathlib import Path
from typing import Protocol

from headrace.data.pipeline import report, summary
from headrace.data.pipeline.context import PipelineContext
from headrace.data.pipeline.normalize_stage import NormalizeStage
from headrace.data.pipeline.pack_stage import PackStage
from headrace.data.pipeline.shuffle_stage import ShuffleStage
from headrace.data.pipeline.stages import STAGES, StageName, StageRecord
from headrace.data.pipeline.tokenizer_stage import TokenizerStage


class Stage(Protocol):
    """A step of data preparation, whose results are files in the data folder."""

    def fingerprint(self) -> str:
        """Hash of all that the results depend on."""
        ...

    def is_outdated(self) -> bool:
        """Whether the stage must run again although its fingerprint has not changed."""
        ...

    def run(self) -> StageRecord:
        """Write the results, and return the record for stages.json. Work that is done is not repeated."""
        ...


class DataPipeline:
    """The stages of one recipe, which share a context."""

    def __init__(self, context: PipelineContext) -> None:
        self.context = context
        self.stages: dict[StageName, Stage] = {
            "normalize": NormalizeStage(context),
            "tokenizer": TokenizerStage(context),
            "pack": PackStage(context),
            "shuffle": ShuffleStage(context),
        }

    def run(self) -> None:
        """Run the stages up to `until`, except for those that are done. After the last one, finish the
        data."""
        until = self.context.until
        for name in STAGES[: STAGES.index(until) + 1]:
            self._run_stage(name)
        if until == "shuffle":
            self._finish()

    def _run_stage(self, name: StageName) -> None:
        log, stage, started_at = self.context.log, self.stages[name], time.perf_counter()
        fingerprint, is_outdated = stage.fingerprint(), stage.is_outdated()
        if log.fingerprint(name) != fingerprint or is_outdated:
            log.invalidate(name)
            log.start(name, fingerprint)
        elif log.is_done(name):
            self.context.report(f"{name}: done before")
            return
        if name != "normalize":  # from here on, the data of an earlier recipe is no longer complete
            (self.context.folder / "index.json").unlink(missing_ok=True)
        record = stage.run()
        record["seconds"] = round(time.perf_counter() - started_at, 2)
        log.update(name, record)

    def _finish(self) -> None:
        """Write the report page, and then the index, which makes the folder a dataset. Remove scratch
        files."""
        context, folder = self.context, self.context.folder
        groups = summary.read_groups(folder)
        counts = summary.read_token_counts(folder)
        index = summary.make_index(context.recipe, context.tokenizer, context.log, groups, counts)
        stats = summary.make_stats(context.recipe, context.log, groups, counts)
        report.write(index, stats, folder / "report.html")
        index.write(folder)
        # First the records: when this is interrupted, packed/ may be incomplete.
        context.log.keep_only(("normalize", "tokenizer"))
        remove_scratch(folder)
        for name, split in index.splits.items():
            context.report(
                f"{name}: {split.rows:,} rows, {split.documents:,} documents, {split.tokens:,} tokens"
            )
        entropy = f"unigram entropy {index.unigram_entropy:.3f} nats"
        context.report(f"{folder} is ready ({index.dtype}, {entropy}); {folder / 'report.html'} describes it")


def remove_scratch(folder: Path) -> None:
    """Remove the files of a data folder that are only needed while it is made."""
    for name in ("read", "packed", "scatter"):
        shutil.rmtree(folder / name, ignore_errors=True)
