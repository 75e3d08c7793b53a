"""First stage: read the sources, normalize and filter their documents, and remove duplicates."""

import functools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.clean import dedup, normalize
from headrace.data.pipeline.context import PipelineContext, check_documents
from headrace.data.pipeline.stages import OUTPUTS, NormalizeRecord, sources_hash, stage_fingerprint
from headrace.data.pipeline.summary import format_counts
from headrace.errors import UserError


class NormalizeStage:
    """Reads the sources, each part of a source in a job of its own."""

    def __init__(self, context: PipelineContext) -> None:
        self.context = context

    def fingerprint(self) -> str:
        """Hash of the recipe keys that documents depend on. Also discards the results of changed sources."""
        self._check_sources()
        return stage_fingerprint(self.context.recipe, "normalize")

    def is_outdated(self) -> bool:
        """Whether documents must be written now, but were only read when they were packed."""
        log = self.context.log
        if log.is_done("normalize") and not log.normalize.get("written") and self.context.writes_documents():
            if (self.context.folder / "packed").exists():
                self.context.report(
                    "normalize: documents are written to files now, and packed again from them"
                )
            return True
        return False

    def run(self) -> NormalizeRecord:
        """Write the documents to FOLDER/normalized, or leave that to the pack stage. Returns the record of
        the stage."""
        context, started_at = self.context, time.perf_counter()
        # Work on another list of files is of no use for these sources.
        context.log.update("normalize", {"units": sources_hash(context.recipe)})
        parts = context.source_parts
        if not context.writes_documents():
            for name in OUTPUTS["normalize"]:
                shutil.rmtree(context.folder / name, ignore_errors=True)
            count = "1 part" if len(parts) == 1 else f"{len(parts):,} parts"
            context.report(f"normalize: {count} will be read by the pack stage")
            return {"written": False}
        finds_duplicates = dedup.is_dedup_enabled(context.recipe)
        summaries = self._normalize_parts(context.folder / ("read" if finds_duplicates else "normalized"))
        problems = [summary["problems"] for summary in summaries]
        if finds_duplicates:
            duplicates = dedup.find_duplicates(
                context.folder / "read", parts, context.recipe.normalize, context.recipe.on_error
            )
            problems.append(duplicates.problems)
            summaries = self._remove_duplicates(duplicates)
        totals = check_documents(summaries, problems)
        size = f"{totals.bytes / 1e6:,.1f} MB in {time.perf_counter() - started_at:.1f} s"
        context.report(
            f"normalize: {totals.documents:,} documents, {size}{format_counts('dropped', totals.dropped)}"
        )
        context.report_unread_files()
        return {
            "documents": totals.documents,
            "bytes": totals.bytes,
            "dropped": totals.dropped,
            "written": True,
            "problems": context.report_problems(problems),
        }

    def _normalize_parts(self, folder: Path) -> list[dict[str, Any]]:
        """Write all parts to `folder`. Returns their summaries."""
        recipe = self.context.recipe
        job = functools.partial(
            normalize.normalize_part, cfg=recipe.normalize, policy=recipe.on_error, folder=str(folder)
        )
        jobs = {normalize.summary_path(folder, part.number): part for part in self.context.source_parts}
        return self.context.run_jobs("normalize", job, jobs)

    def _remove_duplicates(self, duplicates: dedup.DuplicateRows) -> list[dict[str, Any]]:
        """Write all parts to normalized/ without these rows. Returns their summaries."""
        folder = self.context.folder
        jobs = {}
        for part in self.context.source_parts:
            number = part.number
            job = RemovalJob(number, duplicates.rows[number], duplicates.counts[number], str(folder))
            jobs[normalize.summary_path(folder / "normalized", number)] = job
        return self.context.run_jobs("duplicates", remove_duplicates, jobs)

    def _check_sources(self) -> None:
        """Start again if the files of the sources have changed since they were listed."""
        log = self.context.log
        record = log.normalize
        try:
            changed = "units" in record and record["units"] != sources_hash(self.context.recipe)
        except UserError:
            if not record.get("written") and not log.is_done("pack"):
                raise
            changed = False  # the sources are gone, but no longer needed
        if changed:
            self.context.report("normalize: the files of the sources have changed, so it starts again")
            log.invalidate("normalize")


@dataclass(frozen=True, eq=False)
class RemovalJob:
    """The duplicates to remove from one part."""

    number: int  # of the part
    rows: np.ndarray
    counts: dict[str, int]  # by reason
    folder: str  # of the data


def remove_duplicates(job: RemovalJob) -> dict[str, Any]:
    """Copy a part from read/ to normalized/ without its duplicates. Returns its new summary."""
    folder = Path(job.folder)
    return dedup.remove_rows(job.number, job.rows, job.counts, folder / "read", folder / "normalized")
