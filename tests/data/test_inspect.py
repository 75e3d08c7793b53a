import dataclasses
import html.parser
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.data import pack
from headrace.data.documents import SCHEMA, Ragged
from headrace.data.inspect import escape_control, inspect, split_documents, token_spans
from headrace.data.pipeline import report
from headrace.data.shards import Index, Rows, SpecialTokenIds, Split, pack_bits, write_rows
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.verify import filler_start_columns, last_start_columns, verify
from headrace.errors import UserError

LENGTH = 44  # not a multiple of 8, so that the last byte of a row's marks has bits to spare
SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|mask|>"]
PAD, BOS, EOS, MASK = range(4)
ALL_SPECIAL = SpecialTokenIds(BOS, EOS, PAD, MASK)
TEXTS = [
    "The mill wheel turns.\nThe river runs.",
    "größe 水車 🌊!",
    "tab\tbell\x07 escape\x1b[31m end",
    "x = 1",
    "grain and sluice, grain and sluice, grain and sluice and sluice and grain",
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer of 300 entries."""
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    inner.save(str(folder / "tokenizer.json"))
    return folder


class Builder:
    """Builder of packed datasets from rows of documents, each a list of (text, is_trained)."""

    def __init__(self, folder: Path, tokenizer: Path, special: SpecialTokenIds = ALL_SPECIAL) -> None:
        self.folder, self.special = folder, special
        folder.mkdir()
        shutil.copy(tokenizer / "tokenizer.json", folder)
        self.tokenizer = tokenizer_io.load(folder)
        self.sha256 = tokenizer_io.file_sha256(folder)

    def rows(self, rows: list[list[list[tuple[str, bool]]]], *, loss: bool, source: int = 0) -> Rows:
        tokens = np.full((len(rows), LENGTH), self.special.filler, "uint16")
        starts, trained = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
        for row, documents in enumerate(rows):
            column = 0
            for document in documents:
                starts[row, column] = True
                ids: list[tuple[int | None, bool]] = []
                ids += [(self.special.bos, False)] * (self.special.bos is not None)
                ids += [
                    (id, is_trained) for text, is_trained in document for id in self.tokenizer.encode(text)
                ]
                ids += [(self.special.eos, document[-1][1])]
                for id, is_trained in ids:
                    tokens[row, column], trained[row, column] = id, is_trained
                    column += 1
            if column < LENGTH:
                starts[row, column] = True
        sources = np.full(len(rows), source, "uint16")
        return Rows(tokens, pack_bits(starts), pack_bits(trained) if loss else None, sources)

    def index(self, epochs: list[list[Rows]], **changes: Any) -> Index:
        """Write the shards of each epoch, with the counts of the first epoch."""
        shards = tuple(
            tuple(write_rows(self.folder, f"train-{e}-{n:05}", rows) for n, rows in enumerate(epoch))
            for e, epoch in enumerate(epochs)
        )
        tokens = documents = 0
        for rows in epochs[0]:
            flags = np.unpackbits(rows.starts, axis=1, bitorder="little")[:, :LENGTH]
            for row, starts in zip(rows.tokens, flags, strict=True):
                pieces, padding = split_documents(row, starts, self.special.filler)
                tokens += LENGTH - padding
                documents += len(pieces)
        count = sum(len(rows) for rows in epochs[0])
        empty = Split(0, 0, 0, 0, ((),) * len(epochs))
        values: dict[str, Any] = dict(
            sequence_length=LENGTH,
            dtype="uint16",
            vocab=300,
            special=self.special,
            tokenizer_sha256=self.sha256,
            unigram_entropy=4.5,
            sources=("prose", "code"),
            splits={"train": Split(count, documents, tokens, 400, shards), "evaluation": empty},
            recipe={"path": str(self.folder), "sources": {"prose": {"weight": 1.0}, "code": {"weight": 1.0}}},
        )
        index = Index(**values | changes)
        index.write(self.folder)
        return index


def plain(text: str) -> list[tuple[str, bool]]:
    return [(text, True)]


def conversation(*parts: str) -> list[tuple[str, bool]]:
    """A conversation of alternating questions and answers."""
    return [(part, turn % 2 == 1) for turn, part in enumerate(parts)]


@pytest.fixture
def build(tmp_path: Path, tokenizer: Path) -> Builder:
    return Builder(tmp_path / "data", tokenizer)


@pytest.fixture
def dataset(build: Builder) -> Path:
    """Two epochs with the same four rows, of two sources and in two shards, in different orders."""
    first = build.rows([[plain(TEXTS[0])], [plain(TEXTS[1]), plain(TEXTS[3])]], loss=False)
    second = build.rows([[plain(TEXTS[3])], [plain(TEXTS[2])]], loss=False, source=1)
    both = concatenate_rows(first, second)
    build.index([[first, second], [both.select(np.array([2, 0, 3])), both.select(np.array([1]))]])
    return build.folder


def concatenate_rows(a: Rows, b: Rows) -> Rows:
    pairs = zip(a.arrays().values(), b.arrays().values(), strict=True)
    tokens, starts, *loss, sources = (np.concatenate(pair) for pair in pairs)
    return Rows(tokens, starts, loss[0] if loss else None, sources)


def run_inspect(capsys: pytest.CaptureFixture, folder: Path, **options: Any) -> str:
    inspect(folder, **dict(rows=99, width=100) | options)
    return capsys.readouterr().out


def test_inspect_prints_every_document_with_end_tokens_and_padding(
    dataset: Path, capsys: pytest.CaptureFixture
) -> None:
    out = run_inspect(capsys, dataset)
    assert "|| <|bos|>The mill wheel turns.⏎\n   The river runs.<|eos|>\n" in out
    assert "|| <|bos|>größe 水車 🌊!<|eos|>\n|| <|bos|>x = 1<|eos|>\n" in out
    assert "row 1 of train (of 4), source prose, 2 documents" in out
    assert "row 3 of train (of 4), source code, 1 document," in out
    padding = LENGTH - 2 - len(tokenizer_io.load(dataset).encode("x = 1"))
    assert f"… {padding} padding" in out and f"{100 - 100 * padding / LENGTH:.1f} % full" in out
    assert "<|pad|>" not in out


def test_inspect_escapes_control_characters_of_the_data(dataset: Path, capsys: pytest.CaptureFixture) -> None:
    out = run_inspect(capsys, dataset)
    assert "tab\\tbell\\x07 escape\\x1b[31m end" in out
    assert all(c.isprintable() or c == "\n" for c in out)
    assert escape_control("a\u202eb\u200b\r\n") == "a\\u202eb\\u200b\\r\n"


def test_inspect_marks_tokens_that_are_not_trained_on(build: Builder, capsys: pytest.CaptureFixture) -> None:
    rows = build.rows([[conversation("How?", " So 水車."), conversation("Why", "!")]], loss=True)
    build.index([[rows]])
    out = run_inspect(capsys, build.folder)
    assert "|| ⟦<|bos|>How?⟧ So 水車.<|eos|>\n|| ⟦<|bos|>Why⟧!<|eos|>\n" in out
    num_trained = len(build.tokenizer.encode(" So 水車.")) + len(build.tokenizer.encode("!")) + 2
    assert f"{num_trained} tokens trained on" in out
    colored = run_inspect(capsys, build.folder, color=True)
    assert "⟦" not in colored and "\x1b[2;36mHow?\x1b[0m\x1b[36m So 水車." in colored
    assert "\x1b[35m!" in colored, "the second document has another color"


def test_inspect_samples_rows_by_seed(dataset: Path, capsys: pytest.CaptureFixture) -> None:
    outputs = {run_inspect(capsys, dataset, rows=1, seed=seed) for seed in range(20)}
    assert len(outputs) == 4
    assert run_inspect(capsys, dataset, rows=2, seed=5) == run_inspect(capsys, dataset, rows=2, seed=5)


def test_inspect_wraps_lines_to_the_width_and_shortens_long_text(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_normalized(tmp_path, [{"id": "a", "text": "水車 wheel " * 900, "source": "s"}])
    out = run_inspect(capsys, tmp_path, width=40)
    assert "8,100 characters" in out and "6,600 more characters" in out.replace("\n   ", " ")
    wide = [sum(1 + (ord(c) > 0x2E80) for c in line) for line in out.splitlines()[1:]]
    assert max(wide) <= 40 and len(out) < 3000


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1", "FORCE_COLOR": "1", "TERM": "xterm"}])
def test_inspect_writes_to_any_output(dataset: Path, environment: dict[str, str]) -> None:
    command = [
        sys.executable,
        "-c",
        f"from headrace.data.inspect import inspect; inspect({str(dataset)!r}, rows=9)",
    ]
    settings = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "100"} | environment
    settings.pop("FORCE_COLOR" if not environment else "", None)
    out = subprocess.run(command, env=settings, capture_output=True, check=True).stdout.decode("ascii")
    assert "gr\\xf6\\xdfe \\u6c34\\u8eca \\U0001f30a!" in out and "turns.\\n" in out and "... " in out
    assert ("\x1b[1m" in out) == bool(environment) and "\x1b[36m" not in out


def test_characters_split_between_tokens_are_joined(build: Builder) -> None:
    tokens = np.array([BOS, *build.tokenizer.encode("é水"), EOS])
    assert len(tokens) > 4
    texts = [span.text for span in token_spans(tokens, np.ones(len(tokens), bool), build.tokenizer)]
    assert texts == ["<|bos|>", "é水", "<|eos|>"]


def test_spaces_between_spans_are_preserved_for_tokenizers_that_drop_the_first(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "▁so": 2, "▁it": 3, "?": 4}, "?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    spans = token_spans(
        np.array([0, 2, 3, 2]), np.array([False, False, True, True]), tokenizer_io.load(tmp_path)
    )
    assert [span.text for span in spans] == ["<s>", "so", " it so"]


def test_a_last_piece_of_only_filler_is_padding() -> None:
    tokens, starts = np.array([1, 5, 2, 5, 2, 2, 2]), np.array([1, 0, 0, 1, 0, 1, 0])
    assert split_documents(tokens, starts, 2) == ([slice(0, 3), slice(3, 5)], 2)
    assert split_documents(tokens[:5], starts[:5], 2) == ([slice(0, 3), slice(3, 5)], 0)


def write_normalized(folder: Path, documents: list[dict[str, Any]]) -> None:
    (folder / "normalized").mkdir()
    for index, part in enumerate((documents[:1], documents[1:])):
        table = pa.Table.from_pylist(
            [dict(text=None, messages=None, meta=None) | document for document in part], SCHEMA
        )
        pq.write_table(table, folder / "normalized" / f"{index:05}.parquet", row_group_size=2)


def test_inspect_shows_documents_that_are_not_packed_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    messages = [{"role": "user", "content": "What\nis it?"}, {"role": "assistant", "content": "A mill."}]
    documents = [{"id": f"a.txt:{n}", "text": f"text {n}", "source": "prose"} for n in range(5)]
    documents.append({"id": "chat", "messages": json.dumps(messages), "source": "talk"})
    write_normalized(tmp_path, documents)
    out = run_inspect(capsys, tmp_path)
    assert "document 3 (of 6), source prose, id a.txt:3, 6 characters\n|| text 3\n" in out
    assert "|| user: What⏎\n   is it?⏎\n   assistant: A mill.\n" in out


def test_inspect_reports_missing_files_and_invalid_options(tmp_path: Path, dataset: Path) -> None:
    with pytest.raises(UserError, match="holds neither packed data nor normalized documents"):
        inspect(tmp_path / "nothing")
    for read in (inspect, lambda url: verify(url, print)):
        with pytest.raises(UserError, match=r"gs://data/x: only local data can be inspected"):
            read("gs://data/x")
    with pytest.raises(UserError, match="found dev, expected one of train, evaluation"):
        inspect(dataset, split="dev")
    with pytest.raises(UserError, match="evaluation split has no rows"):
        inspect(dataset, split="evaluation")
    with pytest.raises(UserError, match="found 0, expected 1 or more"):
        inspect(dataset, rows=0)
    (dataset / "train-0-00000.npy").write_bytes(b"not an array")
    with pytest.raises(UserError, match=r"train-0-00000.npy cannot be read.*data verify"):
        inspect(dataset, rows=4)


def test_verify_finds_no_fault_in_a_valid_dataset(dataset: Path) -> None:
    lines: list[str] = []
    verify(dataset, lines.append)
    assert lines[0].startswith("train: 2 epochs of 4 rows, ") and lines[0].endswith(" 5 documents")
    assert "4 shards" in lines[-1]


def find_faults(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        verify(folder, lambda line: None)
    return str(caught.value)


def rewrite(folder: Path, name: str, suffix: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change an array, and its checksum in the index to match."""
    file = folder / f"{name}{suffix}.npy"
    array = np.load(file)
    changed = change(array)
    array = array if changed is None else changed
    np.save(file, array)
    rows = Rows(array, array, None, array)
    checksum = write_rows(folder, "scratch", rows).checksums[""]
    index = json.loads((folder / "index.json").read_bytes())
    for epoch in index["splits"]["train"]["epochs"]:
        for shard in epoch:
            if shard["name"] == name:
                shard["checksums"][suffix] = checksum
    (folder / "index.json").write_text(json.dumps(index))


def test_verify_finds_a_changed_bit_in_any_file(dataset: Path) -> None:
    for file in sorted(dataset.glob("train-*.npy")):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert f"{file}: found checksum" in find_faults(dataset)
        file.write_bytes(content)
    verify(dataset, lambda line: None)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda file: file.unlink(), "no such file, expected uint16 of shape (2, 44)"),
        (lambda file: file.write_bytes(file.read_bytes()[:-3]), "not a valid .npy file"),
        (lambda file: file.write_bytes(b""), "not a valid .npy file (0 bytes"),
        (lambda file: file.write_bytes(file.read_bytes() + b"xx"), "found 2 bytes after the array"),
        (
            lambda file: np.save(file, np.load(file)[:1]),
            "found uint16 of shape (1, 44), expected uint16 of (2, 44)",
        ),
        (
            lambda file: np.save(file, np.load(file).astype("uint32")),
            "found uint32 of shape (2, 44), expected",
        ),
    ],
)
def test_verify_finds_a_damaged_file(dataset: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(dataset / "train-1-00000.npy") if "1-00000" in message else damage(dataset / "train-0-00001.npy")
    assert "1 fault;" in find_faults(dataset)
    assert f"train-0-00001.npy: {message}" in find_faults(dataset)


def test_verify_reports_any_broken_header(dataset: Path) -> None:
    file = dataset / "train-0-00001.npy"
    content = file.read_bytes()
    for position, byte in itertools.product(range(0, 70, 3), b"9?\xff"):
        file.write_bytes(content[:position] + bytes([byte]) + content[position + 1 :])
        assert "train-0-00001.npy: " in find_faults(dataset)


def set_value(row: int, column: int, value: int) -> Callable[[np.ndarray], None]:
    def change(array: np.ndarray) -> None:
        array[row, column] = value

    return change


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        ("", set_value(1, 3, 300), ".npy row 1: found token 300, expected less than 300"),
        (".starts", set_value(1, 0, 0), ".starts.npy row 1: found no mark at the first token"),
        (".starts", set_value(0, 5, 1 << 4), ".starts.npy row 0: found bits past token 43"),
        (".sources", lambda array: array + 1, ".sources.npy row 0: found source 2, expected less than 2"),
        ("", set_value(0, 2, 7), "found other rows of code than in epoch 0"),
    ],
)
def test_verify_checks_rows_even_if_checksums_match(
    dataset: Path, suffix: str, change: Callable[[np.ndarray], Any], message: str
) -> None:
    rewrite(dataset, "train-0-00001", suffix, change)
    assert message in find_faults(dataset)


def test_verify_finds_padding_that_is_not_marked(dataset: Path) -> None:
    rewrite(dataset, "train-0-00001", ".starts", lambda bits: bits & np.array([1, 0, 0, 0, 0, 0], "uint8"))
    message = find_faults(dataset)
    assert "train-0-00001.npy row 0: found padding from " in message and ", the last mark at 0" in message
    assert "(and 1 more)" in message


def test_verify_finds_padding_that_would_be_trained_on(build: Builder) -> None:
    rows = build.rows([[conversation("How?", "So.")]], loss=True)
    build.index([[rows]])
    verify(build.folder, lambda line: None)
    assert rows.loss_bits is not None
    build.index([[dataclasses.replace(rows, loss_bits=rows.loss_bits | np.array([0] * 5 + [8], "uint8"))]])
    assert "train-0-00000.loss.npy row 0: found 1 tokens of padding to train on" in find_faults(build.folder)


def test_verify_finds_a_loss_file_that_is_not_in_the_index(dataset: Path) -> None:
    shutil.copy(dataset / "train-0-00000.starts.npy", dataset / "train-0-00000.loss.npy")
    assert "train-0-00000.loss.npy: found a file, expected none" in find_faults(dataset)


@pytest.mark.parametrize("name", ["rows", "tokens", "documents"])
def test_verify_compares_the_counts_of_the_index(dataset: Path, name: str) -> None:
    index = json.loads((dataset / "index.json").read_bytes())
    count = index["splits"]["train"][name]
    index["splits"]["train"][name] += 1
    (dataset / "index.json").write_text(json.dumps(index))
    assert f"train epoch 0: found {count} {name}, expected {count + 1}" in find_faults(dataset)
    assert f"train epoch 1: found {count} {name}, expected {count + 1}" in find_faults(dataset)


def test_verify_finds_an_epoch_of_other_rows_unless_a_source_is_sampled(build: Builder) -> None:
    first = build.rows([[plain(TEXTS[3])], [plain("x = 2")]], loss=False)
    other = build.rows([[plain(TEXTS[3])], [plain("x = 3")]], loss=False)
    index = build.index([[first], [other]])
    assert "train epoch 1: found other rows of prose than in epoch 0" in find_faults(build.folder)
    recipe = {"sources": {"prose": {"weight": 0.5}, "code": {}}}
    dataclasses.replace(index, recipe=recipe).write(build.folder)
    verify(build.folder, lambda line: None)


def test_verify_finds_a_changed_or_missing_tokenizer(dataset: Path) -> None:
    file = dataset / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    assert f"{file}: found sha256 " in find_faults(dataset)
    file.unlink()
    assert f"{file}: no such file" in find_faults(dataset)
    with pytest.raises(UserError, match="is not packed data"):
        verify(dataset / "nowhere", lambda line: None)


def test_verify_finds_a_wrong_vocabulary(dataset: Path) -> None:
    index = json.loads((dataset / "index.json").read_bytes())
    (dataset / "index.json").write_text(json.dumps(index | {"vocab": 299}))
    assert "found vocab 299, expected the tokenizer's 300" in find_faults(dataset)


def test_verify_lists_the_first_faults_and_counts_the_others(dataset: Path) -> None:
    for file in dataset.glob("train-*.npy"):
        file.unlink()
    message = find_faults(dataset)
    assert "12 faults;" in message and message.count("no such file") == 5 and message.endswith("and 7 more")


def test_verify_accepts_a_lone_end_token_as_padding_or_document_if_it_is_the_filler(
    tmp_path: Path, tokenizer: Path
) -> None:
    build = Builder(tmp_path / "data", tokenizer, SpecialTokenIds(None, EOS, None, None))
    ids = range(4, 4 + LENGTH - 1)
    rows = build.rows([[plain("x = 1")]], loss=False)
    tokens = np.array([[*ids, EOS]], "uint16")  # the rest of a document that was split before its last token
    starts = np.zeros((1, LENGTH), bool)
    starts[0, [0, LENGTH - 1]] = True
    index = build.index([[rows, Rows(tokens, pack_bits(starts), None, np.zeros(1, "uint16"))]])
    split = index.splits["train"]
    for extra in (0, 1):
        counted = dataclasses.replace(split, tokens=split.tokens + extra, documents=1 + extra)
        dataclasses.replace(index, splits={"train": counted}).write(build.folder)
        verify(build.folder, lambda line: None)
    wrong = dataclasses.replace(split, tokens=split.tokens + 2, documents=1)
    dataclasses.replace(index, splits={"train": wrong}).write(build.folder)
    assert f"found {split.tokens} tokens, expected {split.tokens + 2}" in find_faults(build.folder)


@pytest.mark.parametrize("mode", ["concat", "document", "best_fit"])
@pytest.mark.parametrize(
    "special", [ALL_SPECIAL, SpecialTokenIds(None, EOS, None, None), SpecialTokenIds(BOS, EOS, None, None)]
)
def test_verify_finds_no_fault_in_packed_data(
    tmp_path: Path, tokenizer: Path, mode: str, special: SpecialTokenIds
) -> None:
    build = Builder(tmp_path / "data", tokenizer, special)
    rng = np.random.default_rng(0)
    prefix = [] if special.bos is None else [special.bos]
    # Many are one token longer than a number of full rows, so the end token is in a row by itself.
    lengths = [*rng.integers(1, 100, 200), *[3 * LENGTH + 1 - len(prefix) - 1] * 40]
    documents = [[*prefix, *rng.integers(4, 300, length), EOS] for length in lengths]
    sizes = np.array([len(document) for document in documents])
    values = np.concatenate(documents).astype("uint16")
    ragged = Ragged(values, np.concatenate([[0], np.cumsum(sizes)]))
    plan = pack.plan_rows(sizes, LENGTH, mode, 0)
    [rows] = pack.fill_rows(plan, ragged, length=LENGTH, filler=special.filler, source=0)
    order = rng.permutation(len(rows))
    index = build.index([[rows], [rows.select(order[:20]), rows.select(order[20:])]])
    split = dataclasses.replace(index.splits["train"], documents=len(documents), tokens=int(sizes.sum()))
    dataclasses.replace(index, splits={"train": split}).write(build.folder)
    verify(build.folder, lambda line: None)


def test_last_starts_and_filler_equal_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    for length in (1, 7, 8, 9, 44):
        flags = rng.random((300, length)) < 0.1
        flags[:, 0] = True
        tokens = rng.integers(0, 2, (300, length)) * (rng.random((300, 1)) < 0.9)
        expected = [max(n for n in range(length) if row[n]) for row in flags]
        assert last_start_columns(pack_bits(flags)).tolist() == expected
        expected_starts = [len("".join(map(str, row)).rstrip("0")) for row in tokens]
        assert filler_start_columns(tokens, 0).tolist() == expected_starts


class Page(html.parser.HTMLParser):
    """HTML parser that checks the nesting of elements and records text and tags."""

    VOID = ("meta", "br", "line", "rect", "polyline")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""


HOSTILE = "<script>alert('x')</script>&\"'"


def statistics(vocab: int) -> dict[str, Any]:
    counts = [0] * 10 + [int(1e6 / (n + 1)) for n in range(vocab - 30)] + [0] * 20
    return {
        "stages": {
            "normalize": {"seconds": 2.0, "bytes": 500_000_000},
            "shuffle": {"seconds": 4, "tokens": 10**8},
        },
        "sources": {
            "prose": {"documents": 1200, "bytes": 5_000_000, "tokens": 1_250_000, "rows": 612, "weight": 1.0},
            HOSTILE: {"documents": 10, "bytes": 100, "tokens": 1_250_000, "rows": 613, "weight": 2.0},
        },
        "dropped": {"empty": 12, "near duplicate": 3456, "unused": 0},
        "problems": {"counts": {HOSTILE: 7}, "samples": [f"a.jsonl:17: {HOSTILE}\x1b"]},
        "lengths": {"edges": [1, 2, 4, 8, 16], "counts": [0, 5, 30, 3]},
        "fill": {"edges": [0, 0.5, 1], "counts": [1, 99]},
        "vocabulary": counts,
        "shuffle": {"rank_correlation": 0.0012, "displacement": 0.9987, "mixing": 0.9991},
    }


def write_report(index: Index, stats: dict[str, Any], folder: Path) -> Page:
    report.write(index, stats, folder / "report.html")
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text
    return Page(text)


def read_index(folder: Path) -> Index:
    return Index.parse((folder / "index.json").read_bytes(), "index.json")


def test_the_report_shows_the_statistics(dataset: Path) -> None:
    index = read_index(dataset)
    split = index.splits["train"]
    page = write_report(index, statistics(300), dataset)
    for number in (
        f"{split.tokens:,}",
        f"{400 / split.tokens:.2f}",
        "250.0",
        "25.00",
        "3,456",
        "0.9991",
        "0.0012",
    ):
        assert number in page.text, number
    assert "66.7 %" in page.text and "33.3 %" in page.text, "shares follow the weights"
    assert "270 of 300 ids occur; 10.0 % never do" in page.text
    assert "8 to 16: 3 (7.89 %)" in page.text and "50 % to 100 %: 99" in page.text
    assert page.tags.count("svg") == 3 and page.tags.count("rect") == 5, (
        "empty bins at the ends are not drawn"
    )


def test_the_report_escapes_everything(dataset: Path) -> None:
    index = read_index(dataset)
    recipe = {"path": HOSTILE, "sources": {HOSTILE: {"weight": 1}}}
    page = write_report(dataclasses.replace(index, recipe=recipe), statistics(300), dataset)
    assert "script" not in page.tags
    # The title, the heading, the recipe (path and source), the source, the problem and its sample.
    assert page.text.count("<script>alert(") == 7 and "\x1b" not in page.text


def test_the_report_shows_tokens_with_visible_spaces(dataset: Path) -> None:
    counts = np.zeros(300, np.int64)
    inner = tokenizer_io.load(dataset).inner
    ids = {text: inner.encode(text).ids[-1] for text in ("a sluice", "\n", "🌊")}
    counts[[BOS, *ids.values()]] = [9, 8, 7, 6]
    np.save(dataset / "counts.npy", counts)
    page = write_report(read_index(dataset), {"vocabulary": str(dataset / "counts.npy")}, dataset)
    for token in ("<|bos|>", "␣sluice", "⏎", str(inner.id_to_token(ids["🌊"]))):
        assert token in page.text, token


def test_the_report_omits_sections_without_numbers(dataset: Path) -> None:
    page = write_report(read_index(dataset), {}, dataset)
    assert "Vocabulary" not in page.text and "Splits" in page.text and "Recipe" in page.text
    empty = {"lengths": {"edges": [0, 1], "counts": [0]}, "vocabulary": [0, 0], "dropped": {}, "stages": {}}
    assert "Nothing." in write_report(read_index(dataset), empty, dataset).text
    (dataset / "tokenizer.json").unlink()
    assert "Most common tokens" in write_report(read_index(dataset), {"vocabulary": [1, 2]}, dataset).text
