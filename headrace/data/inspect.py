"""Examples of prepared data as a model sees them, printed for people.

Packed rows are shown with their documents, special tokens, padding and the tokens that are trained on;
normalized documents where nothing is packed yet."""

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
from rich.console import Console
from rich.text import Text

from headrace.data.documents import SCHEMA
from headrace.data.formats import open as formats_open
from headrace.data.shards import Index, Rows, Shard, read_rows, unpack_bits
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer.tokenizer import Tokenizer
from headrace.errors import UserError

DOCUMENT_MARK = "|| "  # before the first line of a document; its other lines are indented as far
MAX_CHARS = 1500  # shown of a span; the middle of a longer one is omitted
COLORS = ("cyan", "magenta")  # of documents, alternating; legible on light and dark terminals


@dataclass(frozen=True)
class TokenSpan:
    """Text of consecutive tokens of one document: all trained on or none, all text or one special token."""

    text: str
    is_special: bool
    is_trained: bool


@dataclass(frozen=True)
class DisplayStyle:
    """Marks for what has no letter of its own. On a terminal, colors show the rest."""

    line_end: str
    ellipsis: str
    before_untrained: str
    after_untrained: str

    @classmethod
    def of(cls, console: Console) -> "DisplayStyle":
        """Marks that the encoding of the output has."""
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
    color: bool | None = None,
) -> None:
    """Print random rows of a split, or random normalized documents.

    `color` is True or False, or None for colors on a terminal only; without colors, marks show the same."""
    folder = formats_open.require_local(path)
    if rows < 1:
        raise UserError(f"rows: found {rows}, expected 1 or more")
    console = Console(
        force_terminal=color,
        color_system="standard" if color else "auto",
        no_color=False if color else None,
        width=width,
        highlight=False,
        markup=False,
        emoji=False,
        file=sys.stdout,
    )
    if (folder / "index.json").is_file():
        PackedPrinter(folder, split, console).print_rows(rows, seed)
    elif files := sorted(folder.glob("normalized/*.parquet")):
        print_normalized(files, rows, seed, console)
    else:
        raise UserError(
            f"{folder} holds neither packed data nor normalized documents; `headrace data prepare RECIPE` "
            "makes the former, `headrace data normalize RECIPE` the latter"
        )


def split_documents(tokens: np.ndarray, starts: np.ndarray, filler: int) -> tuple[list[slice], int]:
    """Find the documents of a row. Returns their slices, and the number of padding tokens after them.

    `starts` has a flag for each token."""
    bounds = [*np.flatnonzero(starts).tolist(), len(tokens)]
    documents = [slice(first, last) for first, last in itertools.pairwise(bounds)]
    if documents and (tokens[documents[-1]] == filler).all():
        padding = documents.pop()
        return documents, padding.stop - padding.start
    return documents, 0


def token_spans(tokens: np.ndarray, is_trained: np.ndarray, tokenizer: Tokenizer) -> Iterator[TokenSpan]:
    """Decode a document, cut where special tokens and the loss mask change.

    Tokens of a span are decoded together, since one may be half a letter, and with those before them, since
    some tokenizers drop the space at the start of a text."""
    inner = tokenizer.inner
    special = [id for id, token in inner.get_added_tokens_decoder().items() if token.special]
    is_special = np.isin(tokens, special)
    is_change = (is_trained[1:] != is_trained[:-1]) | is_special[1:] | is_special[:-1]
    bounds = [0, *(np.flatnonzero(is_change) + 1).tolist(), len(tokens)]
    text_start = printed_chars = 0  # start of the text since the last special token, and how much was yielded
    for first, last in itertools.pairwise(bounds):
        if is_special[first]:
            text = inner.id_to_token(int(tokens[first])) or ""
            text_start, printed_chars = last, 0
        else:
            decoded = inner.decode(tokens[text_start:last].tolist(), skip_special_tokens=False)
            text, printed_chars = decoded[printed_chars:], len(decoded)
        yield TokenSpan(text, bool(is_special[first]), bool(is_trained[first]))


def escape_control(text: str) -> str:
    """Escape characters that a terminal would obey, hide or reorder. Line ends stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else _escape(c) for c in text)


class PackedPrinter:
    """Prints rows of a packed split."""

    def __init__(self, folder: Path, split: str, console: Console) -> None:
        self.folder, self.split, self.console = folder, split, console
        self.index = Index.parse((folder / "index.json").read_bytes(), str(folder / "index.json"))
        if split not in self.index.splits:
            raise UserError(f"split: found {split}, expected one of {', '.join(self.index.splits)}")
        epochs = self.index.splits[split].epochs
        self.shards = epochs[0] if epochs else ()
        self.total = sum(shard.rows for shard in self.shards)
        if not self.total:
            raise UserError(f"{folder}: the {split} split has no rows to show")
        self.tokenizer = tokenizer_io.load(folder)
        self.style = DisplayStyle.of(console)

    def print_rows(self, count: int, seed: int) -> None:
        """Print random rows, and a legend."""
        for number in sample_sorted(self.total, count, seed):
            self._print_row(number, read_row(self.folder, self.shards, number))
        print_legend(self.style, self.console)

    def _print_row(self, number: int, row: Rows) -> None:
        length, tokens = self.index.sequence_length, row.tokens[0]
        is_trained = np.ones(length, bool)
        if row.loss_bits is not None:
            is_trained = unpack_bits(row.loss_bits[0], length)
        starts = unpack_bits(row.starts[0], length)
        documents, padding = split_documents(tokens, starts, self.index.special.filler)
        self._print_row_header(number, row, is_trained, len(documents), padding)
        for i, place in enumerate(documents):
            spans = token_spans(tokens[place], is_trained[place], self.tokenizer)
            print_document(spans, COLORS[i % len(COLORS)], self.style, self.console)
            if row.labels is not None:
                self._print_labels(tokens[place], row.labels[0][place])
        if padding:
            indent = " " * len(DOCUMENT_MARK)
            self.console.print(Text(f"{indent}{self.style.ellipsis} {padding:,} padding", "dim"))
        self.console.print()

    def _print_row_header(
        self, number: int, row: Rows, is_trained: np.ndarray, documents: int, padding: int
    ) -> None:
        units, noun = (documents // 2, "pair") if self.index.pairs else (documents, "document")
        fill = 1 - padding / self.index.sequence_length
        facts = [
            f"row {number:,} of {self.split} (of {self.total:,})",
            f"source {self.index.source_name(int(row.sources[0]))}",
            f"{units:,} {noun}{'s' * (units != 1)}",
            f"{100 * fill:.1f} % full",
        ]
        if row.loss_bits is not None:
            facts.append(f"{int(is_trained.sum()):,} tokens trained on")
        print_header(facts, self.console)

    def _print_labels(self, tokens: np.ndarray, labels: np.ndarray) -> None:
        """Print the label of a text, or the labels of its tokens, each after its token."""
        positions = np.flatnonzero(labels)
        names = [self.index.labels[number - 1] for number in labels[positions].tolist()]
        if self.index.labelled == "tokens":
            words = [self.tokenizer.inner.decode([int(token)]).strip() for token in tokens[positions]]
            names = [f"{word}/{name}" for word, name in zip(words, names, strict=True)]
        line = f"{' ' * len(DOCUMENT_MARK)}label: {' '.join(names) or 'none'}"
        self.console.print(Text(_fit(escape_control(line), self.console), "bold"), soft_wrap=True)


def print_normalized(files: Sequence[Path], count: int, seed: int, console: Console) -> None:
    """Print random normalized documents."""
    style = DisplayStyle.of(console)
    parts = [pq.ParquetFile(file) for file in files]
    ends = np.cumsum([part.metadata.num_rows for part in parts])
    if not ends[-1]:
        raise UserError(f"{files[0].parent} has no documents to show")
    for i, number in enumerate(sample_sorted(int(ends[-1]), count, seed)):
        part = int(np.searchsorted(ends, number, "right"))
        document = read_document(parts[part], number - (int(ends[part - 1]) if part else 0))
        text = document["text"]
        if text is None:
            text = format_messages(document["messages"])
        facts = [
            f"document {number:,} (of {ends[-1]:,})",
            f"source {document['source']}",
            f"id {document['id']}",
            f"{len(text):,} characters",
        ]
        print_header(facts, console)
        print_document([TokenSpan(text, False, True)], COLORS[i % len(COLORS)], style, console)
        console.print()


def sample_sorted(total: int, count: int, seed: int) -> list[int]:
    """Random distinct numbers below `total`, in order."""
    sample = np.random.default_rng(seed).choice(total, min(count, total), replace=False, shuffle=False)
    return sorted(sample.tolist())


def read_row(folder: Path, shards: Sequence[Shard], number: int) -> Rows:
    """Read a row by its number in all shards together."""
    for shard in shards:
        if number < shard.rows:
            try:
                return read_rows(folder, shard.name).select(slice(number, number + 1))
            except (OSError, ValueError, IndexError) as error:
                hint = "`headrace data verify` finds all faults"
                raise UserError(f"{folder / shard.name}.npy cannot be read: {error}; {hint}") from None
        number -= shard.rows
    raise AssertionError(f"row {number} is past the end")


def read_document(file: pq.ParquetFile, number: int) -> dict[str, Any]:
    """Read one document by column, without more than its row group."""
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if number < rows:
            table = file.read_row_group(group, columns=[name for name in SCHEMA.names if name != "meta"])
            return table.slice(number, 1).to_pylist()[0]
        number -= rows
    raise AssertionError(f"document {number} is past the end")


def format_messages(messages: str) -> str:
    """Format a conversation as lines "role: text". Content other than plain text is shown as JSON."""
    lines = []
    for message in orjson.loads(messages):
        content = message.get("content")
        fields = {key: value for key, value in message.items() if key != "role" and value is not None}
        is_text = isinstance(content, str) and len(fields) == 1
        lines.append(f"{message.get('role')}: {content if is_text else orjson.dumps(fields).decode()}")
    return "\n".join(lines)


def print_document(spans: Iterable[TokenSpan], color: str, style: DisplayStyle, console: Console) -> None:
    """Print the lines of a document, folded to the width of the console, with a mark before the first."""
    text, is_trained = Text(), True
    for span in spans:
        if span.is_trained != is_trained:
            text.append(style.after_untrained if span.is_trained else style.before_untrained)
        is_trained = span.is_trained
        span_color = f"bold reverse {color}" if span.is_special else color
        shown = escape_control(shorten(span.text, style)).replace("\n", f"{style.line_end}\n")
        text.append(_fit(shown, console), span_color if is_trained else f"dim {span_color}")
    text.append("" if is_trained else style.after_untrained)
    prefix = Text(DOCUMENT_MARK, "bold")
    for line in text.split("\n", allow_blank=True):
        for part in line.wrap(console, max(console.width - len(DOCUMENT_MARK), 8), overflow="fold"):
            console.print(Text.assemble(prefix, part), soft_wrap=True)
            prefix = Text(" " * len(DOCUMENT_MARK))


def shorten(text: str, style: DisplayStyle) -> str:
    """Omit the middle of a text of more than MAX_CHARS characters."""
    if len(text) <= MAX_CHARS:
        return text
    omitted = f" {style.ellipsis} {len(text) - MAX_CHARS:,} more characters {style.ellipsis} "
    return text[: 4 * MAX_CHARS // 5] + omitted + text[-MAX_CHARS // 5 :]


def print_header(facts: Sequence[str], console: Console) -> None:
    console.print(Text(_fit(escape_control(", ".join(facts)), console), "bold"), soft_wrap=True)


def print_legend(style: DisplayStyle, console: Console) -> None:
    """Explain the marks and colors."""
    text = Text.assemble(
        (DOCUMENT_MARK, "bold"), "start of a document", f"   {style.line_end} end of a line   "
    )
    if console.is_terminal:
        text.append("special token", "bold reverse").append("   ").append("not trained on", "dim")
    else:
        text.append(f"{style.before_untrained}not trained on{style.after_untrained}")
    console.print(text, soft_wrap=True)


def _fit(text: str, console: Console) -> str:
    """Escape letters that the encoding of the output does not have."""
    return text.encode(console.encoding, "backslashreplace").decode(console.encoding)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
