"""Prints examples of prepared data as a model will meet them: packed rows with their documents, special
tokens, padding and what is to be learnt; or normalised documents, where nothing is packed yet."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from headrace.data.tokenizer import tokenizer as tokenise
from headrace.data.documents import SCHEMA
from headrace.data.formats import open as storage
from headrace.data.shards import Index, Rows, Shard, read_rows, unpack_bits
from headrace.errors import UserError

BEGINS = "|| "  # stands before the first line of a document; the other lines are indented as far
LONGEST = 1500  # characters shown of a stretch of text; of a longer one its middle is left out
COLOURS = ("cyan", "magenta")  # of the documents by turns; legible on light and dark terminals


@dataclass(frozen=True)
class Stretch:
    """Tokens of one document that are alike: all learnt or none, all of text or one special token."""

    text: str
    is_special: bool
    is_learnt: bool


@dataclass(frozen=True)
class Marks:
    """How things look that have no letter of their own. On a terminal styles tell the rest."""

    line_end: str
    ellipsis: str
    before_unlearnt: str
    after_unlearnt: str

    @classmethod
    def of(cls, console: Console) -> "Marks":
        line_end, ellipsis, before, after = "⏎", "…", "⟦", "⟧"
        if _fit(line_end + ellipsis + before, console) != line_end + ellipsis + before:
            line_end, ellipsis, before, after = "\\n", "...", "[[", "]]"
        return cls(line_end, ellipsis, *(("", "") if console.is_terminal else (before, after)))


def inspect(
    path: str | Path,
    *,
    split: str = "train",
    rows: int = 3,
    seed: int = 0,
    width: int | None = None,
    colour: bool | None = None,
) -> None:
    """Prints `rows` of the split, drawn by the seed. Colours are for terminals, unless `colour` says
    otherwise; without them the same is told by marks."""
    folder = storage.here(path)
    if rows < 1:
        raise UserError(f"rows: found {rows}, expected 1 or more")
    console = Console(
        force_terminal=colour,
        color_system="standard" if colour else "auto",
        no_color=False if colour else None,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        file=sys.stdout,
    )
    if (folder / "index.json").is_file():
        _inspect_packed(folder, split, rows, seed, console)
    elif files := sorted(folder.glob("normalized/*.parquet")):
        _inspect_normalised(files, rows, seed, console)
    else:
        raise UserError(
            f"{folder} holds neither packed data nor normalised documents; `headrace data prepare RECIPE` "
            "makes the one, `headrace data normalize RECIPE` the other"
        )


def pieces(tokens: np.ndarray, starts: np.ndarray, filler: int) -> tuple[list[slice], int]:
    """Where the documents of a row lie, and how many tokens of padding follow them."""
    edges = [*np.flatnonzero(starts).tolist(), len(tokens)]
    found = [slice(first, last) for first, last in zip(edges, edges[1:], strict=False)]
    if found and (tokens[found[-1]] == filler).all():
        padding = found.pop()
        return found, padding.stop - padding.start
    return found, 0


def stretches(tokens: np.ndarray, learnt: np.ndarray, tokenizer: tokenise.Tokenizer) -> Iterator[Stretch]:
    """The text of a document. Alike tokens are decoded together, since one may hold half a letter, and
    with those before them, since some tokenizers drop the space that begins a text."""
    inner = tokenizer.inner
    special = [id for id, token in inner.get_added_tokens_decoder().items() if token.special]
    is_special = np.isin(tokens, special)
    changes = (learnt[1:] != learnt[:-1]) | is_special[1:] | is_special[:-1]
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(tokens)]
    context, said = 0, 0  # where the text since the last special token begins, and how much of it is out
    for first, last in zip(edges, edges[1:], strict=False):
        if is_special[first]:
            text = inner.id_to_token(int(tokens[first])) or ""
            context, said = last, 0
        else:
            whole = inner.decode(tokens[context:last].tolist(), skip_special_tokens=False)
            text, said = whole[said:], len(whole)
        yield Stretch(text, bool(is_special[first]), bool(learnt[first]))


def visible(text: str) -> str:
    """What a terminal would obey, hide or reorder is written out; line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def _inspect_packed(folder: Path, split: str, count: int, seed: int, console: Console) -> None:
    index = Index.parse((folder / "index.json").read_bytes(), str(folder / "index.json"))
    if split not in index.splits:
        raise UserError(f"split: found {split}, expected one of {', '.join(index.splits)}")
    shards = index.splits[split].epochs[0] if index.splits[split].epochs else ()
    total = sum(shard.rows for shard in shards)
    if not total:
        raise UserError(f"{folder}: the {split} split has no rows to show")
    tokenizer = tokenise.load(folder)
    marks = Marks.of(console)
    for number in _drawn(total, count, seed):
        row = _row(folder, shards, number)
        learnt = np.ones(index.sequence_length, bool)
        if row.loss is not None:
            learnt = unpack_bits(row.loss[0], index.sequence_length)
        starts = unpack_bits(row.starts[0], index.sequence_length)
        documents, padding = pieces(row.tokens[0], starts, index.special.filler)
        fill = 1 - padding / index.sequence_length
        words = [
            f"row {number:,} of {split} (of {total:,})",
            f"source {index.source(int(row.sources[0]))}",
            f"{len(documents) // (1 + index.pairs):,} {'pair' if index.pairs else 'document'}"
            f"{'s' * (len(documents) != 1 + index.pairs)}",
            f"{100 * fill:.1f} % full",
        ]
        if row.loss is not None:
            words.append(f"{int(learnt.sum()):,} tokens learnt")
        _print_header(words, console)
        for turn, place in enumerate(documents):
            found = stretches(row.tokens[0][place], learnt[place], tokenizer)
            _print_document(found, COLOURS[turn % len(COLOURS)], marks, console)
            if row.labels is not None:
                _print_labels(row.tokens[0][place], row.labels[0][place], index, tokenizer, console)
        if padding:
            console.print(Text(f"{' ' * len(BEGINS)}{marks.ellipsis} {padding:,} padding", "dim"))
        console.print()
    _print_legend(marks, console)


def _inspect_normalised(files: list[Path], count: int, seed: int, console: Console) -> None:
    marks = Marks.of(console)
    opened = [pq.ParquetFile(file) for file in files]
    ends = np.cumsum([file.metadata.num_rows for file in opened])
    if not ends[-1]:
        raise UserError(f"{files[0].parent} has no documents to show")
    for turn, number in enumerate(_drawn(int(ends[-1]), count, seed)):
        which = int(np.searchsorted(ends, number, "right"))
        document = _document(opened[which], number - (int(ends[which - 1]) if which else 0))
        text = document["text"]
        if text is None:
            text = _spoken(document["messages"])
        words = [
            f"document {number:,} (of {ends[-1]:,})",
            f"source {document['source']}",
            f"id {document['id']}",
        ]
        _print_header([*words, f"{len(text):,} characters"], console)
        _print_document([Stretch(text, False, True)], COLOURS[turn % len(COLOURS)], marks, console)
        console.print()


def _drawn(total: int, count: int, seed: int) -> list[int]:
    chosen = np.random.default_rng(seed).choice(total, min(count, total), replace=False, shuffle=False)
    return sorted(chosen.tolist())


def _row(folder: Path, shards: tuple[Shard, ...], number: int) -> Rows:
    for shard in shards:
        if number < shard.rows:
            try:
                return read_rows(folder, shard.name).take(slice(number, number + 1))
            except (OSError, ValueError, IndexError) as error:
                hint = "`headrace data verify` finds all that is wrong"
                raise UserError(f"{folder / shard.name}.npy cannot be read: {error}; {hint}") from None
        number -= shard.rows
    raise AssertionError(f"row {number} is past the end")


def _document(file: pq.ParquetFile, number: int) -> dict[str, str]:
    """One document, without reading more than the row group it lies in."""
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if number < rows:
            table = file.read_row_group(group, columns=[name for name in SCHEMA.names if name != "meta"])
            return table.slice(number, 1).to_pylist()[0]
        number -= rows
    raise AssertionError(f"document {number} is past the end")


def _spoken(messages: str) -> str:
    """A conversation with a role before each thing said. What is not plain text is shown as JSON."""
    lines = []
    for message in orjson.loads(messages):
        content = message.get("content")
        rest = {key: value for key, value in message.items() if key != "role" and value is not None}
        said = content if isinstance(content, str) and len(rest) == 1 else orjson.dumps(rest).decode()
        lines.append(f"{message.get('role')}: {said}")
    return "\n".join(lines)


def _print_document(found: Iterable[Stretch], colour: str, marks: Marks, console: Console) -> None:
    """A document's lines, folded to the width, the first with the mark of a beginning."""
    text, is_learnt = Text(), True
    for stretch in found:
        if stretch.is_learnt != is_learnt:
            text.append(marks.after_unlearnt if stretch.is_learnt else marks.before_unlearnt)
        is_learnt = stretch.is_learnt
        style = f"bold reverse {colour}" if stretch.is_special else colour
        said = visible(_shortened(stretch.text, marks)).replace("\n", f"{marks.line_end}\n")
        text.append(_fit(said, console), style if is_learnt else f"dim {style}")
    text.append("" if is_learnt else marks.after_unlearnt)
    first = Text(BEGINS, "bold")
    for line in text.split("\n", allow_blank=True):
        for part in line.wrap(console, max(console.width - len(BEGINS), 8), overflow="fold"):
            console.print(Text.assemble(first, part), soft_wrap=True)
            first = Text(" " * len(BEGINS))


def _print_labels(
    tokens: np.ndarray, labels: np.ndarray, index: Index, tokenizer: tokenise.Tokenizer, console: Console
) -> None:
    """The label of a text, or those of its words, each after the token it stands at."""
    places = np.flatnonzero(labels)
    names = [index.labels[number - 1] for number in labels[places].tolist()]
    if index.labelled == "tokens":
        pieces = [tokenizer.inner.decode([int(token)]).strip() for token in tokens[places]]
        names = [f"{piece}/{name}" for piece, name in zip(pieces, names, strict=True)]
    said = f"{' ' * len(BEGINS)}label: {' '.join(names) or 'none'}"
    console.print(Text(_fit(visible(said), console), "bold"), soft_wrap=True)


def _shortened(text: str, marks: Marks) -> str:
    if len(text) <= LONGEST:
        return text
    left_out = f" {marks.ellipsis} {len(text) - LONGEST:,} more characters {marks.ellipsis} "
    return text[: 4 * LONGEST // 5] + left_out + text[-LONGEST // 5 :]


def _print_header(words: list[str], console: Console) -> None:
    console.print(Text(_fit(visible(", ".join(words)), console), "bold"), soft_wrap=True)


def _print_legend(marks: Marks, console: Console) -> None:
    text = Text.assemble((BEGINS, "bold"), "a document begins", f"   {marks.line_end} a line ends", "   ")
    if console.is_terminal:
        text.append("special token", "bold reverse").append("   ").append("not learnt", "dim")
    else:
        text.append(f"{marks.before_unlearnt}not learnt{marks.after_unlearnt}")
    console.print(text, soft_wrap=True)


def _fit(text: str, console: Console) -> str:
    """What the output's encoding has no letters for, written out."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
