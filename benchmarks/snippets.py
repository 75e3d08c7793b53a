"""A labeled dataset that every machine can make: snippets of Python's standard library, labeled with their
package. Lines that name a package are removed, so that the label must be predicted from the style of the
code."""

import json
import random
import re
import sys
import sysconfig
from pathlib import Path

from headrace.data.sources.python_library import list_files

PACKAGES = ("asyncio", "concurrent", "ctypes", "email", "importlib", "logging", "multiprocessing", "tkinter",
            "unittest", "xml")  # fmt: skip
LINES = 8  # of a snippet
MOST = 300  # snippets of a package


def snippets(seed: int = 0) -> list[dict[str, str]]:
    named = re.compile("|".join((*PACKAGES, r"^\s*(from|import)\s")))
    found: dict[str, list[str]] = {name: [] for name in PACKAGES}
    for name, path in list_files(Path(sysconfig.get_path("stdlib"))):
        package = name.split("/")[0]
        if package in found:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if line.strip() and not named.search(line)]
            found[package] += ["\n".join(kept[n : n + LINES]) for n in range(0, len(kept) - LINES + 1, LINES)]
    draw, records = random.Random(seed), []
    for package, texts in found.items():
        texts = sorted(set(texts))
        chosen = draw.sample(texts, min(MOST, len(texts)))
        records += [{"text": text, "label": package} for text in chosen]
    draw.shuffle(records)
    return records


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "data/snippets.jsonl")
    target.parent.mkdir(parents=True, exist_ok=True)
    made = snippets()
    target.write_text("".join(json.dumps(record) + "\n" for record in made))
    print(f"{target}: {len(made):,} snippets of {len({record['label'] for record in made})} packages")
