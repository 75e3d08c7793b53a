"""Context that the stages of data preparation share: recipe, folder, workers, and the documents of the
sources."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.config.sections import DataRecipe
from headrace.data.clean import dedup, normalize
from headrace.data.clean.normalize import SourcePart
from headrace.data.documents import MAX_SAMPLES, FilePart, Problems, is_held_out
from headrace.data.pipeline.pool import WorkerPool
from headrace.data.pipeline.progress import Bar
from headrace.data.pipeline.stages import ProblemCounts, StageLog, StageName
from headrace.data.pipeline.summary import format_counts, sum_counts
from headrace.data.shards import write_json
from headrace.data.sources import files
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.errors import UserError

Reporter = Callable[[str], None]  # prints a line
Job = TypeVar("Job")

MIN_HELD_OUT = 10  # documents; where the share comes to fewer, rows are held out instead


@dataclass
class PipelineContext:
    """Recipe, data folder and tools of a pipeline, with access to its documents."""

    recipe: DataRecipe
    folder: Path
    pool: WorkerPool
    report: Reporter
    log: StageLog
    until: StageName = "shuffle"  # the last stage to run

    def run_jobs(self, label: str, run: Callable[[Job], Any], jobs: Mapping[Path, Job]) -> list[Any]:
        """Run the jobs whose result file does not exist yet, and return the results of all, in order.

        A result is JSON and is written to its file by the worker, so it is kept if another job fails. `label`
        names the work in the progress bar."""
        if not jobs:
            return []
        remaining = [(job, path) for path, job in jobs.items() if not self._has_result(path)]
        for folder in {path.parent for path in jobs}:
            folder.mkdir(parents=True, exist_ok=True)
        with Bar(label, len(jobs), done=len(jobs) - len(remaining)) as bar:
            for _, result in self.pool.run(functools.partial(run_and_record, run=run), remaining):
                bar.advance(result or {})
        return [json.loads(path.read_bytes()) for path in jobs]

    def _has_result(self, path: Path) -> bool:
        """Whether a job has left its result. One that skipped bad input does not count if that is an error
        now."""
        if not path.exists():
            return False
        result = json.loads(path.read_bytes()) or {}
        return self.recipe.on_error == "skip" or not result.get("problems", {}).get("counts")

    @functools.cached_property
    def tokenizer(self) -> tokenizer_io.Tokenizer:
        """The tokenizer in the data folder. Not before its stage is done."""
        return tokenizer_io.load(self.folder)

    @functools.cached_property
    def source_parts(self) -> list[SourcePart]:
        """The parts of all sources, in the order of the recipe."""
        return normalize.list_source_parts(self.recipe)

    def document_parts(self) -> list[SourcePart]:
        """The parts from which documents are packed: normalized ones if they were written."""
        return self.normalized_parts() if self.log.normalize["written"] else self.source_parts

    def normalized_parts(self) -> list[SourcePart]:
        """The parts in normalized/, whose sources may be gone."""
        folder = self.folder / "normalized"
        summaries = [json.loads(file.read_bytes()) for file in folder.glob("*.json")]
        paths = [normalize.part_path(folder, summary["number"]) for summary in summaries]
        missing = [path for path in paths if not path.exists()]
        if missing or sum(summary["documents"] for summary in summaries) != self.log.normalize["documents"]:
            location = missing[0] if missing else f"a file of {folder}"
            raise UserError(f"{location} is missing; remove {self.folder} and make the data again")
        parts = [
            SourcePart(summary["number"], summary["source"], None, FilePart(summary["file"]))
            for summary in summaries
        ]
        return sorted(parts, key=lambda part: part.number)

    def writes_documents(self) -> bool:
        """Whether normalized documents are written to files before they are packed.

        They are if the command ends there, if a tokenizer is trained on them, if duplicates are searched
        among them, and if finished data must be kept until the sources have been read without errors."""
        return (
            self.until == "normalize"
            or self.recipe.tokenizer.use != "file"
            or dedup.is_dedup_enabled(self.recipe)
            or (self.folder / "index.json").exists()
        )

    def holds_out_rows(self, documents: int) -> bool:
        """Whether rows are held out for evaluation, since there are too few documents to hold any out."""
        return 0 < self.recipe.pack.eval_fraction * documents < MIN_HELD_OUT

    def sample_texts(self, size: int) -> Iterator[str]:
        """Yield about `size` characters of text that is not held out, from random places of all parts."""
        documents = self.log.normalize.get("documents")
        holds_out_rows = documents is not None and self.holds_out_rows(documents)
        share = 0.0 if holds_out_rows else self.recipe.pack.eval_fraction
        tables = self._normalized_tables() if self.log.normalize["written"] else self._first_tables()
        for table in tables:
            texts = normalize.text_column(table).to_pylist()
            for id, text in zip(table["id"].to_pylist(), texts, strict=True):
                if share and is_held_out(id, share):
                    continue
                yield text
                size -= len(text)
                if size <= 0:
                    return

    def _normalized_tables(self) -> Iterator[pa.Table]:
        """Row groups of the normalized documents, in random order."""
        row_groups: list[tuple[Path, int]] = []
        for part in self.normalized_parts():
            file = normalize.part_path(self.folder / "normalized", part.number)
            row_groups += [(file, group) for group in range(pq.read_metadata(file).num_row_groups)]
        for index in self._permutation(len(row_groups)):
            file, group = row_groups[index]
            yield pq.ParquetFile(file).read_row_group(group, columns=["id", "text", "messages"])

    def _first_tables(self) -> Iterator[pa.Table]:
        """The first table of each part of the sources, in random order."""
        for index in self._permutation(len(self.source_parts)):
            reader = normalize.PartReader(
                self.source_parts[index], self.recipe.normalize, Problems(self.recipe.on_error)
            )
            yield from itertools.islice(reader.iter_tables(), 1)

    def _permutation(self, size: int) -> list[int]:
        return np.random.Generator(np.random.PCG64(self.recipe.seed)).permutation(size).tolist()

    def report_unread_files(self) -> None:
        """Report files of the sources that are not read because their format is unknown."""
        for name, source in self.recipe.sources.items():
            unread = files.list_unread(source) if source.use == "files" else []
            if unread:
                count = "1 file is" if len(unread) == 1 else f"{len(unread):,} files are"
                self.report(f"sources.{name}: {count} not read, of no known format; first {unread[0]}")

    def report_problems(self, problems: Sequence[ProblemCounts]) -> ProblemCounts:
        """Report bad input that was skipped, and where it is. Returns the counts of all jobs together."""
        counts = sum_counts(part["counts"] for part in problems)
        samples = [line for part in problems for line in part["samples"]][:MAX_SAMPLES]
        if counts:
            self.report(f"bad input{format_counts('skipped', counts)}")
            for sample in samples[:3]:
                self.report(f"  {sample}")
        return {"counts": counts, "samples": samples}


def run_and_record(item: tuple[Job, Path], run: Callable[[Job], Any]) -> Any:
    """Run a job and write its result to a file, in the worker: it is kept if another job fails."""
    job, path = item
    result = run(job)
    write_json(path, result)
    return result


def check_documents(
    parts: Sequence[Mapping[str, Any]], problems: Sequence[ProblemCounts]
) -> "DocumentTotals":
    """Add up the summaries of parts that were read. UserError if no document is left."""
    totals = DocumentTotals(
        documents=sum(part["documents"] for part in parts),
        bytes=sum(part["bytes"] for part in parts),
        dropped=sum_counts(part["dropped"] for part in parts),
    )
    if not totals.documents:
        read = sum(part["documents_read"] for part in parts)
        skipped = sum_counts(part["counts"] for part in problems)
        first_sample = [sample for part in problems for sample in part["samples"]][:1]
        raise UserError(
            f"sources: no documents are left of {read:,} read{format_counts('dropped', totals.dropped)}"
            f"{format_counts('skipped', skipped)}" + "".join(f"; first {sample}" for sample in first_sample)
        )
    return totals


@dataclass(frozen=True)
class DocumentTotals:
    """Documents that were read from the sources."""

    documents: int
    bytes: int
    dropped: dict[str, int]  # by filters, by reason
