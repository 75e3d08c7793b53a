"""The parts of benchmarks.data that start with text: training of tokenizers, tokenizing, all stages end to
end, conversations, memory."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from benchmarks import data_corpus
from benchmarks.data_measure import (
    Cost,
    Line,
    Missing,
    Peak,
    Peer,
    Rate,
    children,
    compare,
    demand,
    measured,
    wait_for_orphans,
)
from headrace.data.chat import encode
from headrace.data.shards import Index
from headrace.data.tokenizer import encoders, unicode_drift
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer.train import SPECIAL_TOKENS

ROOT = Path(__file__).parent.parent
VOCAB = 32768
LENGTH = 2048
TRAINED_ON = 100  # MB
SLICE = 40  # MB for slow peers; rates are compared

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}
{% else %}{{ message['content'] }}<|im_end|>
{% endif %}{% endfor %}"""


@dataclass
class Bench:
    """Shared state of all parts. Text and tokenizer are made when the first part needs them."""

    folder: Path
    megabytes: float
    peers: str  # the interpreter that has datatrove, datasets, grain
    streaming: str  # and the one that has mosaicml-streaming

    @cached_property
    def files(self) -> list[Path]:
        made = data_corpus.write(self.folder / "corpus", self.megabytes)
        os.sync()  # else the system writes it to the disk during the first measurement
        return made

    def first(self, megabytes: float) -> list[str]:
        """Files with about this much text."""
        chosen, size = [], 0.0
        for file in self.files:
            if size < megabytes:
                chosen.append(str(file))
                size += file.stat().st_size / 1e6
        return chosen

    @cached_property
    def slice(self) -> Path:
        """A folder with the text for slow peers."""
        folder = self.folder / "slice"
        folder.mkdir()
        for file in self.first(SLICE):
            (folder / Path(file).name).symlink_to(file)
        return folder

    @cached_property
    def sample(self) -> tuple[Path, int]:
        """Text to train tokenizers on, and how many texts were left out: those with characters too new for
        Hugging Face's tables, on which ours are not trained."""
        texts = read_texts(self.first(min(TRAINED_ON, self.megabytes)))
        new = unicode_drift.has_drifting(pa.array(texts, pa.large_string()))
        lines = [orjson.dumps({"text": t}) for t, is_new in zip(texts, new, strict=True) if not is_new]
        (self.folder / "sample.jsonl").write_bytes(b"\n".join(lines))
        return self.folder / "sample.jsonl", int(new.sum())

    @cached_property
    def tokenizer(self) -> Path:
        """The folder of a tokenizer trained by Headrace."""
        train(self, "ours")
        return self.folder / "ours"


def text_megabytes(files: list[str]) -> float:
    return sum(len(text.encode()) for text in read_texts(files)) / 1e6


def read_texts(files: list[str]) -> list[str]:
    return [orjson.loads(line)["text"] for file in files for line in open(file, "rb")]


def tokenizing(bench: Bench) -> list[Line]:
    """Ids of all documents compared with Hugging Face's, and rates of one thread each. Every document is
    tokenized once, because the libraries cache words, and a second time would be faster than any real
    work."""
    tokenizer = tokenizer_io.load(bench.tokenizer, "gigatoken")
    hostile = bench.folder / "hostile.jsonl"
    hostile.write_bytes(
        b"\n".join(orjson.dumps({"text": t}) for t in encoders.adversarial_texts(tokenizer.inner))
    )
    files, real = {"adversarial texts": [str(hostile)], "documents": bench.first(SLICE)}, "documents"
    arrow = pa.array(read_texts(files[real]), pa.large_string())
    size, ours = arrow.nbytes / 1e6, Rate("MB/s")
    pieces = [arrow.slice(i, 1000) for i in range(0, len(arrow), 1000)]
    lines: list[Line] = []
    for library in ("tokenizers", "fastokens", "tiktoken"):
        theirs = Rate("MB/s")
        for _ in range(2):
            tokenizer = tokenizer_io.load(bench.tokenizer, "gigatoken")
            tokenizer.encode_batch(arrow[:1])
            _, cost = measured(partial(encode_all, tokenizer, pieces))
            ours.add(size, cost)
        try:
            with Peer.script(
                "tokenizing", sys.executable if library == "tokenizers" else bench.peers
            ) as peer:
                for name, given in files.items():
                    path = str(bench.tokenizer / "tokenizer.json")
                    peer.ask(library=library, tokenizer=path, files=given)
                    _, cost = peer.ask()
                    if name == real:
                        theirs.add(size, cost)
                    if library == "tokenizers":
                        peer.ask(out=str(bench.folder / "ids.npz"))
                        lines.append(same_ids(name, tokenizer, read_texts(given), bench.folder / "ids.npz"))
        except Missing as error:
            lines.append(Line("tokenizing", library, str(ours), str(error)))
            continue
        least = 40.0 if library == "tokenizers" else 0.0
        lines.append(compare("tokenizing", f"vs {library}", ours, theirs, least=least))
    return lines


def encode_all(tokenizer: tokenizer_io.Tokenizer, pieces: list[pa.LargeStringArray]) -> None:
    for piece in pieces:
        tokenizer.encode_batch(piece)


def same_ids(name: str, tokenizer: tokenizer_io.Tokenizer, texts: list[str], file: Path) -> Line:
    wanted = np.load(file)
    found = tokenizer.encode_batch(pa.array(texts, pa.large_string()))
    splits = (
        np.split(found.values, found.offsets[1:-1]),
        np.split(wanted["values"], np.cumsum(wanted["lengths"])[:-1]),
    )
    differ = sum(not np.array_equal(ours, theirs) for ours, theirs in zip(*splits, strict=True))
    return Line(
        "tokenizing", f"{name} with different ids", f"{differ} of {len(texts)}", target="0", met=differ == 0
    )


def training(bench: Bench) -> list[Line]:
    ours, theirs = train(bench, "ours"), train(bench, "theirs")
    merges = [
        json.loads((bench.folder / name).read_bytes())["model"]["merges"]
        for name in ("ours/tokenizer.json", "theirs/tokenizer.json")
    ]
    same = sum(one == other for one, other in zip(*merges, strict=False))
    equal = Line(
        "training",
        "merges as Hugging Face's",
        f"{same} of {len(merges[1])}",
        target="all",
        met=merges[0] == merges[1],
        note=f"without {bench.sample[1]} texts of very new characters",
    )
    return [compare("training", f"vs tokenizers, {VOCAB} entries", ours, theirs, least=4.0), equal]


def train(bench: Bench, who: str) -> Rate:
    """Both have the texts in memory already; both may use all cores."""
    files, out = [str(bench.sample[0])], bench.folder / who
    out.mkdir(exist_ok=True)
    rate, size = Rate("MB/s"), text_megabytes(files)
    environment = {"TOKENIZERS_PARALLELISM": "true", "PYTHONPATH": str(ROOT)}
    with Peer.script("our_training" if who == "ours" else "training", sys.executable, environment) as peer:
        peer.ask(files=files)
        place = str(out) if who == "ours" else str(out / "tokenizer.json")
        _, cost = peer.ask(vocab=VOCAB, special=list(SPECIAL_TOKENS.values()), out=place)
    rate.add(size, cost)
    return rate


def end_to_end(bench: Bench) -> list[Line]:
    """Two processes each. Ours is the complete command including startup; of peers only the work counts.
    datatrove leaves files of shuffled documents and merges them in an additional step, which is shown
    separately."""
    ours, lines = Rate("MB/s"), []
    found: dict[str, tuple[Rate, float, str]] = {}
    size = text_megabytes([str(file) for file in bench.files])
    for number, (name, least, script, options) in enumerate(rivals(bench)):
        whole = bool(options.get("fast"))
        megabytes = size if whole else text_megabytes([str(file) for file in bench.slice.iterdir()])
        note = "" if whole else f"it got {megabytes:.0f} of {size:.0f} MB"
        out = bench.folder / script / str(number)
        out.mkdir(parents=True)
        before = children()
        ours.add(size, prepare(bench, bench.folder / f"prepared{number}", bench.folder / "corpus"))
        common = {
            "tokenizer": str(bench.tokenizer / "tokenizer.json"),
            "eos": SPECIAL_TOKENS["eos"],
            "out": str(out),
        }
        rate, merged = Rate("MB/s"), Rate("MB/s")
        try:
            environment = {"HF_DATASETS_CACHE": f"{out}/cache", "HF_HUB_OFFLINE": "1"}
            with Peer.script(script, bench.peers, environment) as peer:
                _, cost = peer.ask(**common, **options)
                rate.add(megabytes, cost)
                found[name] = rate, least, note
                if "fast" in options:
                    _, more = peer.ask(merge=True, out=str(out))
                    merged.add(megabytes, Cost(cost.wall + more.wall, cost.cpu + more.cpu))
                    found[f"{name}, merged"] = merged, 0.0, note
        except Missing as error:
            lines.append(Line("end-to-end", name, "", str(error)))
        wait_for_orphans(before)
    for name, (rate, least, note) in found.items():
        lines.append(compare("end-to-end", f"vs {name}", ours, rate, least=least, note=note))
    return lines


def rivals(bench: Bench) -> list[tuple[str, float, str, dict[str, Any]]]:
    """Each peer with the required ratio, its script and its options."""
    small, whole = str(bench.slice), str(bench.folder / "corpus")
    files = [str(file) for file in sorted(bench.slice.iterdir())]
    return [
        ("Megatron-like preprocess", 20.0, "megatron_like", {"files": files}),
        ("HF datasets map + group", 20.0, "datasets_map", {"files": files, "length": LENGTH}),
        ("datatrove", 20.0, "datatrove_pipeline", {"folder": small, "fast": ""}),
        ("datatrove with gigatoken", 2.0, "datatrove_pipeline", {"folder": whole, "fast": "tokenizer"}),
        (
            "the same, with faster writing",
            0.0,
            "datatrove_pipeline",
            {"folder": whole, "fast": "batches"},
        ),
    ]


def prepare(bench: Bench, path: Path, source: Path, peak: list[Peak] | None = None) -> Cost:
    """Run `headrace data prepare` over JSON lines in a folder, with an existing tokenizer."""
    recipe = path.with_suffix(".yaml")
    recipe.write_text(
        f"path: {path}\nworkers: 2\nsources: {{real: {{path: {source}}}}}\n"
        f"tokenizer: {{use: file, path: {bench.tokenizer}}}\npack: {{sequence_length: {LENGTH}}}\n"
    )

    def work() -> None:
        before = children()
        command = [sys.executable, "-m", "headrace", "data", "prepare", str(recipe)]
        with (path.with_suffix(".log")).open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            watch = Peak(process.pid)
            if peak is not None:
                peak.append(watch)
                watch.start()
            code = process.wait()
            watch.ended.set()
        assert code == 0, path.with_suffix(".log").read_text()
        wait_for_orphans(before)

    _, cost = measured(work)
    return cost


def chats(bench: Bench) -> list[Line]:
    """Ids and masks compared with transformers, and the rates, one thread each."""
    folder = bench.folder / "chat"
    conversations = make_chats(read_texts(bench.first(10)))
    inner = tokenizer_io.load(bench.tokenizer).inner
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder.mkdir()
    tokenizer_io.save(
        tokenizer_io.Tokenizer(inner, tokenizer_io.load(bench.tokenizer).special, chat_template=TEMPLATE),
        folder,
    )
    tokenizer = tokenizer_io.load(folder)
    (folder / "chats.jsonl").write_bytes(b"\n".join(map(orjson.dumps, conversations)))
    texts = [orjson.dumps(conversation).decode() for conversation in conversations]
    slow = encode.find_slow_reason(tokenizer)
    assert slow is None, slow
    ours, theirs = Rate("M tokens/s"), Rate("M tokens/s")
    found = encode.encode_chats(tokenizer, texts)
    assert found.loss_mask is not None
    try:
        with Peer.script("chat_offsets", sys.executable) as peer:
            peer.ask(tokenizer=str(folder), chats=str(folder / "chats.jsonl"))
            for number in range(3):
                _, cost = measured(lambda: encode.encode_chats(tokenizer, texts))
                ours.add(len(found.values) / 1e6, cost)
                extra = {"out": str(folder / "theirs.npz")} if number == 2 else {}
                answer, cost = peer.ask(**extra)
                theirs.add(answer["tokens"] / 1e6, cost)
    except Missing as error:
        return [Line("chat", "transformers", "", str(error))]
    wanted = np.load(folder / "theirs.npz")
    same = {
        "ids": np.array_equal(found.values, wanted["values"]),
        "masks": np.array_equal(found.loss_mask, wanted["masks"]),
    }
    lines = [compare("chat", "vs transformers, by offsets", ours, theirs, least=20.0)]
    for name, equal in same.items():
        shown = f"{len(found)} conversations, {'equal' if equal else 'DIFFERENT'}"
        lines.append(Line("chat", f"{name} as transformers'", shown, target="equal", met=equal))
    share = float(found.loss_mask.mean())
    return [*lines, Line("chat", "share of tokens with loss", f"{share:.1%}")]


def make_chats(texts: list[str]) -> list[list[dict[str, str]]]:
    """Paragraphs of real text as turns of about 400 characters, two to eight of them."""
    made: list[list[dict[str, str]]] = []
    turns: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        for paragraph in text[:20_000].split("\n\n"):
            if len(paragraph) > 20:
                turns.append({"role": ("user", "assistant")[len(turns) % 2], "content": paragraph[:800]})
            if len(turns) >= 2 + 2 * ((number + len(made)) % 4):
                made.append(turns)
                turns = []
    return made


def memory(bench: Bench, gigabytes: float) -> list[Line]:
    """Peak memory of the command and its workers over a corpus of the same files under many names."""
    folder = bench.folder / "many"
    folder.mkdir()
    size, number = 0, 0
    while size < gigabytes * 1e9:
        file = bench.files[number % len(bench.files)]
        (folder / f"{number:06d}.jsonl").symlink_to(file)
        size, number = size + file.stat().st_size, number + 1
    peak: list[Peak] = []
    rate = Rate("MB/s")
    rate.add(size / 1e6, prepare(bench, bench.folder / "large", folder, peak))
    splits = Index.parse((bench.folder / "large/index.json").read_bytes(), "index.json").splits
    what = f"peak over {size / 1e9:.1f} GB, {splits['train'].tokens / 1e9:.2f} G tokens"
    return [
        demand("memory", f"{what}, RSS", peak[0].rss / 2**30, 2.0, unit="GiB", most=True),
        demand("memory", f"{what}, PSS", peak[0].pss / 2**30, 2.0, unit="GiB", most=True),
        Line("memory", "rate during it", str(rate), note=f"{os.cpu_count()} cores"),
    ]
