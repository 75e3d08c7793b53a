"""What the stages that make data do, one after the other: normalize, tokenizer, pack, shuffle."""

import dataclasses
import functools
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from headrace.data import annotations, pack_job as groups, pause_tokens as pauses, shuffle
from headrace.data.chat import encode as chat
from headrace.data.clean import dedup as duplicates, normalize as normalise
from headrace.data.tokenizer import train as learn, tokenizer as tokenise
from headrace.data.pipeline import report, summary
from headrace.data.documents import SAMPLES, Part, Problems, is_held_out
from headrace.data.formats import PART
from headrace.data.pipeline.progress import Bar
from headrace.data.shards import smallest_dtype
from headrace.data.sources import files
from headrace.data.pipeline.stages import MAKES, Stages, brought, listing, read_template
from headrace.data.pipeline.summary import told, total
from headrace.errors import UserError

GROUPS = 32  # wanted, for the workers to share
FEWEST_HELD_OUT = 10  # documents; where the share comes to fewer, rows are held out instead
SAMPLE = 400_000  # bytes of text on which a fast encoder is compared with the reference


class Work(Stages):
    """The work of each stage."""

    def make_normalize(self) -> dict[str, Any]:
        cfg, policy, began = self.recipe.normalize, self.recipe.errors, time.perf_counter()
        units = self.listed()
        if not self.writes_text():
            for name in MAKES["normalize"]:
                shutil.rmtree(self.folder / name, ignore_errors=True)
            number = "1 part is" if len(units) == 1 else f"{len(units):,} parts are"
            self.say(f"normalize: {number} to be read when packed")
            return {"written": False}
        sought = duplicates.are_sought(self.recipe)
        first, last = self.folder / ("read" if sought else "normalized"), self.folder / "normalized"
        unit = functools.partial(normalise.normalise_part, cfg=cfg, policy=policy, folder=str(first))
        parts = self.units("normalize", unit, {normalise.summary_place(first, u.number): u for u in units})
        problems = [part["problems"] for part in parts]
        if sought:
            found = duplicates.find(first, units, cfg, policy)
            problems.append(found.problems)
            places = {
                normalise.summary_place(last, n): Removal(n, found.rows[n], found.counts[n], str(self.folder))
                for n in (unit.number for unit in units)
            }
            parts = self.units("duplicates", remove, places)
        made = self.totals(parts, problems)
        rate = f"{made['bytes'] / 1e6:,.1f} MB in {time.perf_counter() - began:.1f} s"
        self.say(f"normalize: {made['documents']:,} documents, {rate}{told('left out', made['dropped'])}")
        self.tell_unread()
        return made | {"written": True, "problems": self.tell_problems(problems)}

    def totals(self, parts: list[dict[str, Any]], problems: list[dict[str, Any]]) -> dict[str, Any]:
        """Of all parts that were read. There must be a document."""
        made = {
            "documents": sum(part["documents"] for part in parts),
            "bytes": sum(part["bytes"] for part in parts),
            "dropped": total(part["dropped"] for part in parts),
        }
        if not made["documents"]:
            read, skipped = (
                sum(part["documents_read"] for part in parts),
                total(problem["counts"] for problem in problems),
            )
            first = [place for problem in problems for place in problem["samples"]][:1]
            raise UserError(
                f"sources: no documents are left of {read:,} read{told('left out', made['dropped'])}"
                f"{told('skipped', skipped)}" + "".join(f"; first {place}" for place in first)
            )
        return made

    def tell_unread(self) -> None:
        for name, source in self.recipe.sources.items():
            unread = files.left_out(source) if source.use == "files" else []
            if unread:
                number = "1 file is" if len(unread) == 1 else f"{len(unread):,} files are"
                self.say(f"sources.{name}: {number} not read, of no known format; first {unread[0]}")

    def tell_problems(self, problems: list[dict[str, Any]]) -> dict[str, Any]:
        """Says what was skipped, and the first places. Returns it for the page about the data."""
        counts = total(problem["counts"] for problem in problems)
        samples = [line for problem in problems for line in problem["samples"]][:SAMPLES]
        if counts:
            self.say(f"bad input{told('skipped', counts)}")
            for sample in samples[:3]:
                self.say(f"  {sample}")
        return {"counts": counts, "samples": samples}

    def listed(self) -> list[normalise.Unit]:
        """All there is to read, which is noted down: work on another list is of no use to this one."""
        stage = self.stages["normalize"] | {"units": listing(self.recipe)}
        self.keep(self.stages | {"normalize": stage})
        return self.parts

    @functools.cached_property
    def parts(self) -> list[normalise.Unit]:
        return normalise.units(self.recipe)

    def make_tokenizer(self) -> dict[str, Any]:
        """Trains a tokenizer, on nothing that is held out, or takes the one named; then chooses what is
        to encode with it."""
        cfg, began = self.recipe.tokenizer, time.perf_counter()
        if cfg.use == "file":
            tokenise.copy(cfg.path, self.folder)
        else:
            texts = self.sample(cfg.sample * 1_000_000)
            with Bar("tokenizer", 1):
                trained = learn.train(texts, kind=cfg.use, vocab=cfg.vocab, report=self.say)
            tokenise.save(trained, self.folder)
        if self.recipe.pack.pause:
            pauses.add_token(self.folder)
        if cfg.template is not None:
            tokenise.write_template(self.folder, read_template(cfg.template))
        tokenizer = self.tokenizer
        choice = tokenise.choose(tokenizer, list(self.sample(SAMPLE)))
        found = ", ".join(f"{role} {id}" for role, id in vars(tokenizer.special).items() if id is not None)
        self.say(
            f"tokenizer: {tokenizer.vocab:,} entries ({found}) in {time.perf_counter() - began:.1f} s; "
            f"{choice.name} encodes ({choice.why})"
        )
        if cfg.use != "file" and tokenizer.vocab < cfg.vocab:
            self.say(
                f"tokenizer: fewer entries than tokenizer.vocab, {cfg.vocab:,}, since the text has no more"
            )
        if tokenizer.template is not None and (why := chat.why_slow(tokenizer)) is not None:
            self.say(f"tokenizer: conversations take longer with it, since {why}")
        return {"vocab": tokenizer.vocab, "encoder": choice.name, "brought": brought(self.recipe)}

    @functools.cached_property
    def tokenizer(self) -> tokenise.Tokenizer:
        """The one in the folder, once its stage has made it."""
        return tokenise.load(self.folder)

    def make_pack(self) -> dict[str, Any]:
        recipe, began = self.recipe, time.perf_counter()
        made = self.pack_groups()
        if "documents" not in self.stages["normalize"]:  # they were read only now
            parts = [part for one in made for part in one["parts"]]
            read = self.totals(parts, [one["problems"] for one in made])
            counts = {key: read[key] for key in ("documents", "dropped")}
            known = self.stages | {"normalize": self.stages["normalize"] | counts}
            if few := self.few_held_out(read["documents"]):
                shutil.rmtree(self.folder / "packed")
            self.keep(known)
            if few:
                made = self.pack_groups()
            if read["dropped"]:
                self.say(f"pack: {read['documents']:,} documents{told('left out', read['dropped'])}")
            self.tell_unread()
            if listing(self.recipe) != self.stages["normalize"]["units"]:
                raise UserError("sources: their files have changed while they were read; begin again")
        problems = self.tell_problems([one["problems"] for one in made])
        notes = [one["notes"] for one in made]
        for line in annotations.told(notes, recipe.pack.sequence_length):
            self.say(f"pack: {line}")
        splits = {name: [group[name] for one in made for group in one["groups"]] for name in groups.SPLITS}
        documents, tokens, size, rows = (
            sum(split[key] for one in splits.values() for split in one)
            for key in ("documents", "tokens", "bytes", "rows")
        )
        fill = tokens / max(1, rows * recipe.pack.sequence_length)
        seconds = time.perf_counter() - began
        self.say(
            f"pack: {rows:,} rows of {recipe.pack.sequence_length}, {tokens:,} tokens, "
            f"{size / max(tokens, 1):.2f} bytes a token, {fill:.2%} full in {seconds:.1f} s"
        )
        if not rows:
            raise UserError(
                f"pack.sequence_length: {recipe.pack.sequence_length} is too short for all there is"
            )
        share, held = recipe.pack.evaluation, sum(split["rows"] for split in splits["evaluation"])
        if not rows - held:
            raise UserError(f"pack.evaluation: {share} holds out all {documents} documents; lower it")
        if share and not held:
            raise UserError(f"pack.evaluation: {share} of {rows} rows holds out none; raise it, or set 0")
        if self.few_held_out(self.stages["normalize"]["documents"]):
            self.say(f"pack: {share:.2%} of the rows are held out, since the documents are few")
        totals = {"documents": documents, "tokens": tokens, "bytes": size, "rows": rows, "fill": fill}
        return totals | {"problems": problems, "kinds": sorted(annotations.kinds(notes))}

    def pack_groups(self) -> list[dict[str, Any]]:
        recipe, names = self.recipe, list(self.recipe.sources)
        stage, tokenizer = self.stages["normalize"], self.stages["tokenizer"]
        # How many documents there are is not known before they are read; that they are few, is seldom.
        few = self.few_held_out(stage["documents"]) if "documents" in stage else False
        jobs = [
            groups.Job(
                number=number,
                units=units,
                written=stage["written"],
                source=names.index(units[0].source),
                folder=str(self.folder),
                tokenizer=str(self.folder),
                encoder=tokenizer["encoder"],
                normalize=recipe.normalize,
                pack=recipe.pack,
                dtype=smallest_dtype(tokenizer["vocab"]),
                seed=recipe.seed,
                held_out="rows" if few else "documents",
                errors=recipe.errors,
            )
            for number, units in enumerate(self.groups())
        ]
        places = {self.folder / "packed" / f"{job.number:05d}.json": job for job in jobs}
        return self.units("pack", groups.pack_group, places)

    def make_shuffle(self) -> dict[str, Any]:
        recipe, began = self.recipe, time.perf_counter()
        length = recipe.pack.sequence_length
        filler = self.tokenizer.special.filler
        row_bytes = length * np.dtype(smallest_dtype(self.stages["tokenizer"]["vocab"])).itemsize
        epochs: dict[str, list[list[dict[str, Any]]]] = {}
        for split in groups.SPLITS:
            passes = shuffle.plan_shuffle(
                self.inputs(split),
                folder=str(self.folder),
                split=split,
                seed=recipe.seed,
                epochs=recipe.shuffle.epochs if split == "train" else 1,
                rounds=recipe.shuffle.rounds,
                row_bytes=row_bytes,
                filler=filler,
            )
            epochs[split] = []
            reading = [number for number, one in enumerate(passes) if one.gather[0].round.number == 0]
            for number, one in enumerate(passes):
                scratch = self.folder / "scatter"
                places = {scratch / f"{job.round.run(job.number)[8:]}.json": job for job in one.scatter}
                self.units("scatter", shuffle.scatter, places)
                if one.scatter and number == reading[-1]:
                    self.spend(split)
                places = {
                    scratch / f"{Path(job.round.output(job.number)).name}-{job.round.number}.json": job
                    for job in one.gather
                }
                made = self.units("shuffle", shuffle.gather, places)
                if one.gather[0].round.last:
                    epochs[split].append(made)
        if not epochs["train"]:
            raise UserError("sources: their weights leave no row to train on; raise one")
        quality = shuffle.quality([shard["quality"] for shard in epochs["train"][0]])
        seconds = time.perf_counter() - began
        rows = sum(shard["shard"]["rows"] for shard in epochs["train"][0])
        tokens = rows * length * len(epochs["train"])
        mixing = "not measured" if quality.mixing is None else f"{quality.mixing:.3f}"
        self.say(
            f"shuffle: {len(epochs['train'])} x {rows:,} rows in {seconds:.1f} s; rank correlation "
            f"{quality.rank_correlation:+.3f}, displacement {quality.displacement:.3f}, "
            f"mixing {mixing} (uniform: 0, 1, 1)"
        )
        shards = {
            name: [[shard["shard"] for shard in epoch] for epoch in sets] for name, sets in epochs.items()
        }
        return {"tokens": tokens, "shards": shards, "quality": dataclasses.asdict(quality)}

    def spend(self, split: str) -> None:
        """Removes packed rows that were scattered for the last time: a third of all that lies on the disk."""
        self.keep(self.stages | {"pack": self.stages["pack"] | {"spent": True}})
        for file in (self.folder / "packed").glob(f"*-{split}*.npy"):
            file.unlink()

    def complete(self) -> None:
        """The page about the data, and the index that makes it data; then what stood between can go."""
        packed = self.packed()
        counts = sum(np.load(file) for file in sorted((self.folder / "packed").glob("*.counts.npy")))
        inputs = {
            "sources": self.stages["normalize"]["units"],
            "tokenizer": self.stages["tokenizer"]["brought"],
        }
        index = summary.index(
            self.recipe,
            self.tokenizer,
            self.stages["shuffle"]["shards"],
            packed,
            counts,
            inputs=inputs,
            kinds=set(self.stages["pack"]["kinds"]),
        )
        stats = summary.stats(self.recipe, self.stages, packed, counts)
        report.write(index, stats, self.folder / "report.html")
        index.write(self.folder)
        # From now on packed/ is not to be relied on: it may be half gone when this is stopped.
        self.keep({name: self.stages[name] for name in ("normalize", "tokenizer")})
        self.tidy()
        for name, split in index.splits.items():
            self.say(f"{name}: {split.rows:,} rows, {split.documents:,} documents, {split.tokens:,} tokens")
        entropy = f"unigram entropy {index.unigram_entropy:.3f} nats"
        self.say(f"{self.folder} is ready ({index.dtype}, {entropy}); {self.folder / 'report.html'} shows it")

    def tidy(self) -> None:
        for name in ("read", "packed", "scatter"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def sample(self, size: int) -> Iterator[str]:
        """About so many bytes of text that is not held out, in tables drawn evenly from all parts."""
        documents = self.stages["normalize"].get("documents")
        few = documents is not None and self.few_held_out(documents)
        share = 0.0 if few else self.recipe.pack.evaluation
        for table in self.written_tables() if self.stages["normalize"]["written"] else self.first_tables():
            for id, text in zip(table["id"].to_pylist(), normalise.contents(table).to_pylist(), strict=True):
                if share and is_held_out(id, share):
                    continue
                yield text
                size -= len(text)
                if size <= 0:
                    return

    def written_tables(self) -> Iterator[pa.Table]:
        """Row groups of the normalised documents, in random order."""
        row_groups: list[tuple[Path, int]] = []
        for unit in self.written_parts():
            file = normalise.place(self.folder / "normalized", unit.number)
            row_groups += [(file, group) for group in range(pq.read_metadata(file).num_row_groups)]
        for number in self.permutation(len(row_groups)):
            file, group = row_groups[number]
            yield pq.ParquetFile(file).read_row_group(group, columns=["id", "text", "messages"])

    def first_tables(self) -> Iterator[pa.Table]:
        """The beginnings of all parts of the sources, in random order."""
        for number in self.permutation(len(self.parts)):
            reading = normalise.Reading(
                self.parts[number], self.recipe.normalize, Problems(self.recipe.errors)
            )
            yield from itertools.islice(reading.tables(), 1)

    def permutation(self, size: int) -> list[int]:
        return np.random.Generator(np.random.PCG64(self.recipe.seed)).permutation(size).tolist()

    def written_parts(self) -> list[normalise.Unit]:
        """The parts in normalized/, which may have outlived their sources."""
        folder = self.folder / "normalized"
        parts = [json.loads(file.read_bytes()) for file in folder.glob("*.json")]
        places = [normalise.place(folder, part["number"]) for part in parts]
        gone = [place for place in places if not place.exists()]
        if gone or sum(part["documents"] for part in parts) != self.stages["normalize"]["documents"]:
            where = gone[0] if gone else f"some of {folder}"
            raise UserError(f"{where} is gone; remove {self.folder} to make the data anew")
        units = [normalise.Unit(part["number"], part["source"], None, Part(part["file"])) for part in parts]
        return sorted(units, key=lambda unit: unit.number)

    def few_held_out(self, documents: int) -> bool:
        """Whether documents are too few to hold any out, so that rows are."""
        return 0 < self.recipe.pack.evaluation * documents < FEWEST_HELD_OUT

    def groups(self) -> Iterator[tuple[normalise.Unit, ...]]:
        """Parts of one source, one after the other, that are packed together. Their number counts and not
        their documents, so that these need not be known."""
        parts = self.written_parts() if self.stages["normalize"]["written"] else self.parts
        most = max(1, min(len(parts) // GROUPS, groups.LARGEST // PART))
        for _, members in itertools.groupby(parts, key=lambda unit: unit.source):
            units = tuple(members)
            yield from (units[start : start + most] for start in range(0, len(units), most))

    def packed(self) -> list[dict[str, Any]]:
        """What there is to tell of each group, in order."""
        files = sorted((self.folder / "packed").glob("*.json"), key=lambda file: int(file.stem))
        return [group for file in files for group in json.loads(file.read_bytes())["groups"]]

    def inputs(self, split: str) -> list[shuffle.Input]:
        weights = [source.weight for source in self.recipe.sources.values()]
        numbers = {name: 1 + number for number, name in enumerate(summary.labels(self.packed()))}
        return [
            shuffle.Input(
                f"packed/{one[split]['shard']['name']}",
                one[split]["rows"],
                source=one["source"],
                weight=weights[one["source"]] if split == "train" else 1.0,
                loss=".loss" in one[split]["shard"]["checksums"],
                labels=(0, *(numbers[name] for name in one["labels"]))
                if ".labels" in one[split]["shard"]["checksums"]
                else (),
            )
            for one in self.packed()
            if one[split]["rows"]
        ]


@dataclass(frozen=True, eq=False)
class Removal:
    """The duplicates to take out of one part."""

    number: int
    rows: np.ndarray
    counts: dict[str, int]
    folder: str


def remove(job: Removal) -> dict[str, Any]:
    folder = Path(job.folder)
    return duplicates.remove(job.number, job.rows, job.counts, folder / "read", folder / "normalized")
