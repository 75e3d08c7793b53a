"""A data recipe from end to end: source, tokenizer, packing. All the work on text is done here, once, before
an accelerator waits for it; the folder appears whole or not at all."""

import dataclasses
import importlib
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from millrace.config import to_dict
from millrace.data import tokenise
from millrace.data.pack import Index, choose_dtype, choose_filler, is_held_out, pack
from millrace.data.tokenise import Document, Tokenizer
from millrace.errors import UserError

T = TypeVar("T")
Report = Callable[[str], None]


def prepare(recipe: Any, report: Report) -> dict[str, Any]:
    """Makes the packed data of a recipe and returns its index. Does nothing where that was done before."""
    target = Path(recipe.path)
    index = finished(target)
    if index is not None and same(index.recipe, to_dict(recipe)):
        report(f"{target} is already made by this recipe; remove it to make it again")
        return dataclasses.asdict(index)
    if index is not None:
        report(f"{target} was made by another recipe and will be replaced")

    # Beside the target, so that putting it in place is a rename. A killed run leaves this and no more.
    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "new").mkdir(parents=True)
    try:
        index = make(recipe, scratch / "new", report)
        if target.exists():
            target.rename(scratch / "old")
        (scratch / "new").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return dataclasses.asdict(index)


def make(recipe: Any, folder: Path, report: Report) -> Index:
    began = time.perf_counter()
    source = importlib.import_module(f"millrace.data.sources.{recipe.source.use}")
    tokenizer = make_tokenizer(recipe, lambda: source.rows(recipe.source), folder)
    special = tokenizer.special
    found = ", ".join(f"{role} {id}" for role, id in vars(special).items() if id is not None)
    report(f"tokenizer: {tokenizer.vocab} entries ({found}), {time.perf_counter() - began:.1f} s")

    began = time.perf_counter()
    dtype = choose_dtype(recipe.pack.dtype, tokenizer.vocab)
    documents = watched(tokenizer.encode_documents(source.rows(recipe.source), dtype), "tokenising")
    packed = pack(documents, folder, cfg=recipe.pack, seed=recipe.seed, filler=choose_filler(special))
    index = Index(
        sequence_length=recipe.pack.sequence_length,
        dtype=dtype,
        vocab=tokenizer.vocab,
        special=special,
        tokenizer_sha256=tokenise.sha256(folder),
        unigram_entropy=packed.unigram_entropy,
        splits=packed.splits,
        recipe=to_dict(recipe),
    )
    index.write(folder)
    for name, split in packed.splits.items():
        size = f"{split.rows:,} rows of {index.sequence_length}, {split.tokens:,} tokens"
        report(f"{name}: {size}, {split.bytes / max(split.tokens, 1):.2f} bytes a token")
    entropy = f"unigram entropy {index.unigram_entropy:.3f} nats"
    report(f"packed as {dtype}, {entropy}, {time.perf_counter() - began:.1f} s")
    return index


def make_tokenizer(recipe: Any, rows: Callable[[], Iterator[Document]], folder: Path) -> Tokenizer:
    """Trains the tokenizer, on nothing that is held out, or copies the one named, into `folder`."""
    cfg, share = recipe.tokenizer, recipe.pack.evaluation
    if cfg.use == "file":
        tokenise.copy(cfg.path, folder)
    else:
        texts = (row.text for row in watched(rows(), "reading") if not is_held_out(row.id, share))
        tokenise.save(tokenise.train(texts, cfg.vocab), folder)
    return tokenise.load(folder)


def finished(target: Path) -> Index | None:
    """The index of data made before. A folder that holds anything else is not ours to replace."""
    if (target / "index.json").is_file():
        return Index.read(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"path: {target} exists and holds no packed data; choose another, or remove it")
    return None


def same(made: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether two recipes make the same data: where it lies does not matter."""
    return made | {"path": ""} == wanted | {"path": ""}


def watched(items: Iterable[T], label: str) -> Iterator[T]:
    """Counts documents on a terminal as they pass. How many will come is not known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        yield from progress.track(items, total=None, description=label)
