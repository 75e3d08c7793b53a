"""Text to measure on: sources and documentation on this machine, each file once, as JSON lines, with
occasional strings that are difficult for tokenizers."""

import gzip
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import orjson

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt", ".html", ".h", ".hpp")
NAMES = ("README", "NEWS", "copyright", "changelog", "CHANGES", "LICENSE")
LARGEST = 400_000  # bytes of a file; larger files are tables and generated code
HOSTILE = (
    "e\u0301 o\u0308\u0323 각 ﬁ Å \u0301 क्षि กำ",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 1️⃣ \U0001f9d1\U0001f3ff\u200d\U0001f680",
    "שלום مرحبا \u202eabc\u202c \u200fאבג 12 ab",
    "русский 中文字符 日本語テキスト 한국어 ไทย हिन्दी Ünïcödé mixedрусский中文",
    "\ue000 \ufdd0 \ufffd \uffff \U0010ffff \x00 a\x00b \ufeff \u200b \u2028x\u2029",
    "<|eos|> <|pad|> </s> [SEP] <0x0A> ▁ Ġ <|im_start|>",
    "I'm you're WE'LL 'S 'ſ don''t l’eau can't've 1234567890 ٣٤ ④ ½",
    " " * 300 + "x" + "\t" * 50 + "\r\n \r\n" + "a" * 2000,
)


def write(folder: Path, megabytes: float) -> list[Path]:
    """Write files of about 10 MB, at least four."""
    folder.mkdir(parents=True)
    count = max(4, round(megabytes / 10))
    paths = [folder / f"{number:04d}.jsonl" for number in range(count)]
    files = [path.open("wb") for path in paths]
    size, number, wanted = 0, 0, megabytes * 1_000_000
    for text in texts():
        line = orjson.dumps({"id": f"document-{number}", "text": text}) + b"\n"
        files[number % count].write(line)
        size, number = size + len(line), number + 1
        if size >= wanted:
            break
    for file in files:
        file.close()
    return paths


def texts() -> Iterator[str]:
    """Yield each file as it is, then all of them again with a word changed, and so on."""
    turn = 0
    while True:
        for number, text in enumerate(real()):
            if turn:
                text = f"{turn} {text.replace(' the ', f' the {turn} ', 1)}"
            if number % 50 == 0:
                middle = len(text) // 2
                text = f"{text[:middle]}\n{HOSTILE[number // 50 % len(HOSTILE)]}\n{text[middle:]}"
            yield text
        turn += 1


def real() -> Iterator[str]:
    """Yield files in a pseudorandom order that is always the same, so that a small corpus has some of
    everything."""
    paths = sysconfig.get_paths()
    roots = {paths["purelib"], paths["stdlib"], "/usr/share"}
    files = {file for root in sorted(roots) for file in walk(root)}
    seen: set[bytes] = set()
    for file in sorted(files, key=lambda file: digest(str(file))):
        text = read(file)
        if text and digest(text) not in seen:
            seen.add(digest(text))
            yield text


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).digest()


def walk(root: str) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in names:
            plain = name.removesuffix(".gz")
            if plain.endswith(SUFFIXES) or plain.startswith(NAMES):
                yield Path(folder) / name


def read(file: Path) -> str:
    """The text of a file; None if it is not UTF-8 or not of a suitable size."""
    try:
        if file.is_symlink() or not file.is_file() or not 100 <= file.stat().st_size <= LARGEST:
            return ""
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return ""
