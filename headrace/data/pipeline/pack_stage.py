"""Third stage: tokenize the documents and pack them in rows of one length."""

import itertools
import shutil
import time
from collections.abc import Iterator

from headrace.data import annotations, pack_job
from headrace.data.clean.normalize import SourcePart
from headrace.data.formats import PART_BYTES
from headrace.data.pack_job import PackJob, PackResult
from headrace.data.pipeline.context import PipelineContext, check_documents
from headrace.data.pipeline.stages import PackRecord, sources_hash, stage_fingerprint
from headrace.data.pipeline.summary import PackTotals, format_counts
from headrace.data.shards import smallest_dtype
from headrace.errors import UserError

MIN_JOBS = 32  # at least, if there are as many parts, for the workers to share


class PackStage:
    """Packs documents, from normalized files or directly from the sources."""

    def __init__(self, context: PipelineContext) -> None:
        self.context = context

    def fingerprint(self) -> str:
        return stage_fingerprint(self.context.recipe, "pack")

    def is_outdated(self) -> bool:
        """Whether packed rows were deleted by a shuffle, and are needed for another one."""
        log = self.context.log
        shuffle_fingerprint = stage_fingerprint(self.context.recipe, "shuffle")
        return log.pack.get("spent", False) and log.fingerprint("shuffle") != shuffle_fingerprint

    def run(self) -> PackRecord:
        """Write packed rows to FOLDER/packed. Returns the record of the stage."""
        context, started_at = self.context, time.perf_counter()
        length = context.recipe.pack.sequence_length
        results = self._pack()
        if "documents" not in context.log.normalize:  # they were read by these jobs
            results = self._record_documents(results)
        problems = context.report_problems([result["problems"] for result in results])  # type: ignore[misc]
        notes = [result["notes"] for result in results]
        for line in annotations.describe_annotations(notes, length):
            context.report(f"pack: {line}")
        totals = PackTotals.of([group for result in results for group in result["groups"]])
        fill = totals.tokens / max(1, totals.rows * length)
        context.report(
            f"pack: {totals.rows:,} rows of {length}, {totals.tokens:,} tokens, "
            f"{totals.bytes / max(totals.tokens, 1):.2f} bytes per token, {fill:.2%} full in "
            f"{time.perf_counter() - started_at:.1f} s"
        )
        self._check_splits(totals)
        return {
            "documents": totals.documents,
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            "rows": totals.rows,
            "fill": fill,
            "problems": problems,
            "kinds": sorted(annotations.collect_kinds(notes)),
        }

    def _pack(self) -> list[PackResult]:
        """Run the jobs that pack all documents."""
        jobs = {self.context.folder / "packed" / f"{job.number:05d}.json": job for job in self._make_jobs()}
        return self.context.run_jobs("pack", pack_job.run_pack_job, jobs)

    def _record_documents(self, results: list[PackResult]) -> list[PackResult]:
        """Complete the record of the normalize stage with the documents that the jobs have read.

        Packs again if it turns out that they are too few to hold any of them out."""
        context = self.context
        summaries = [summary for result in results for summary in result["parts"]]
        totals = check_documents(summaries, [result["problems"] for result in results])  # type: ignore[misc]
        holds_out_rows = context.holds_out_rows(totals.documents)
        if holds_out_rows:
            shutil.rmtree(context.folder / "packed")
        context.log.update("normalize", {"documents": totals.documents, "dropped": totals.dropped})
        if holds_out_rows:
            results = self._pack()
        if totals.dropped:
            context.report(f"pack: {totals.documents:,} documents{format_counts('dropped', totals.dropped)}")
        context.report_unread_files()
        if sources_hash(context.recipe) != context.log.normalize["units"]:
            raise UserError("sources: their files have changed while they were read; run the command again")
        return results

    def _check_splits(self, totals: PackTotals) -> None:
        """Raise UserError if the rows, or those of a split that should have some, are none."""
        context, pack = self.context, self.context.recipe.pack
        if not totals.rows:
            raise UserError(
                f"pack.sequence_length: {pack.sequence_length} is too short for all documents of the sources"
            )
        if totals.evaluation_rows == totals.rows:
            raise UserError(
                f"pack.eval_fraction: {pack.eval_fraction} holds out all {totals.documents} documents; "
                "lower it"
            )
        if pack.eval_fraction and not totals.evaluation_rows:
            raise UserError(
                f"pack.eval_fraction: {pack.eval_fraction} of {totals.rows} rows holds out none; raise it, "
                "or set 0"
            )
        if context.holds_out_rows(context.log.normalize["documents"]):
            context.report(
                f"pack: {pack.eval_fraction:.2%} of the rows are held out, because there are few documents"
            )

    def _make_jobs(self) -> Iterator[PackJob]:
        context, recipe = self.context, self.context.recipe
        source_names = list(recipe.sources)
        normalized, tokenizer = context.log.normalize, context.log.tokenizer
        # The number of documents is unknown before they are read. That they are few is rare.
        holds_out_rows = "documents" in normalized and context.holds_out_rows(normalized["documents"])
        for number, parts in enumerate(self._group_parts()):
            yield PackJob(
                number=number,
                source_parts=parts,
                is_normalized=normalized["written"],
                source=source_names.index(parts[0].source),
                folder=str(context.folder),
                tokenizer=str(context.folder),
                encoder=tokenizer["encoder"],
                normalize=recipe.normalize,
                pack=recipe.pack,
                dtype=smallest_dtype(tokenizer["vocab"]),
                seed=recipe.seed,
                held_out="rows" if holds_out_rows else "documents",
                on_error=recipe.on_error,
            )

    def _group_parts(self) -> Iterator[tuple[SourcePart, ...]]:
        """Yield consecutive parts of one source that are packed together.

        The groups follow from the number of parts, not of documents, which need not be known."""
        parts = self.context.document_parts()
        group_size = max(1, min(len(parts) // MIN_JOBS, pack_job.MAX_GROUP_BYTES // PART_BYTES))
        for _, members in itertools.groupby(parts, key=lambda part: part.source):
            source_parts = tuple(members)
            for start in range(0, len(source_parts), group_size):
                yield source_parts[start : start + group_size]
