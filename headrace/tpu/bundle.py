"""The working tree as one archive: what git tracks and what it would, with changes, and nothing secret.
Its checksum is its name, so that a worker that has it is sent nothing."""

import hashlib
import io
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.storage import redact as secret
from headrace.errors import UserError
from headrace.tpu.workers import Workers

# Names and contents of files that stay here, whatever git thinks of them. Programs and texts may be called
# after tokens, and speak of keys; of tokenizers everything is sent.
SECRET_FOLDERS = {".aws", ".ssh", ".gnupg", ".kaggle", ".docker", ".kube"}
SECRET_NAMES = re.compile(
    r"\.env.*|.*\.(pem|key|p12|pfx)|.*credentials.*|[._]netrc|kaggle\.json|google_compute_engine.*"
    r"|secrets?\.(ya?ml|json|toml|ini|env|txt)|\.(pypirc|npmrc|boto|s3cfg)"
)
# The same as far as tar's patterns go, for who does it by hand.
SECRET_BY_HAND = (
    *sorted(SECRET_FOLDERS),
    *(".env*", "*.pem", "*.key", "*.p12", "*.pfx", "*credentials*", ".netrc", "_netrc", "kaggle.json"),
    *("google_compute_engine*", "secret.*", "secrets.*", ".pypirc", ".npmrc", ".boto", ".s3cfg", "id_*"),
    *("*api_key*", "*hf_token*"),
)
SECRET_UNLESS_SOURCE = re.compile(
    r"id_.*|(?!(special|added)_tokens).*token(?!i[sz]).*|.*api_?key.*", re.IGNORECASE
)
SOURCE = {".py", ".md"}
KEY = re.compile(rb"PRIVATE KEY-{5}")
KEY_ITSELF = re.compile(rb"PRIVATE KEY-{5}(\s|\\n)+[A-Za-z0-9+/]{16}")
ACCOUNT = re.compile(rb'"private_key"\s*:|"type"\s*:\s*"(service_account|authorized_user)"')
# A variable that holds a secret, with a value that is no other variable and no word for "put it here".
ASSIGNED = re.compile(
    rb"""(?im)^\s*(?:export\s+|-\s*)?["']?[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|(?:API|ACCESS|PRIVATE)_?KEY)["']?"""
    rb"""[ \t]*[=:][ \t]*["']?(?![$<{*]|your|x{3})[\w+/.-]{12,}["']?,?[ \t]*$"""
)
TOKENS = ("hf_", "AIza", "ya29.", "AKIA", "ASIA", "gh", "sk-")
LARGEST = 64 * 2**20  # bytes of a file

UNPACK = """
set -eu
place="$HOME/.headrace/trees/{name}"
if [ ! -d "$place" ]; then
  mkdir -p "$place.new.$$"
  tar xzf - -C "$place.new.$$"
  mv -T "$place.new.$$" "$place" 2>/dev/null || mv "$place.new.$$" "$place"
fi
ln -sfn "$place" "$HOME/.headrace/tree"
"""


@dataclass(frozen=True)
class Bundle:
    name: str  # the checksum of what is in it
    content: bytes
    files: int
    left_out: tuple[str, ...]  # for being secret, too large, or links out of the tree


def root() -> Path:
    """The clone of Headrace that this is run from: what trains there is what is here."""
    found = Path(headrace.__file__).resolve().parents[1]
    for name in ("pyproject.toml", "constraints.txt"):
        if not (found / name).is_file():
            raise UserError(f"{found}: found no {name}, expected a clone of Headrace (pip install -e .)")
    return found


def listed(tree: Path) -> list[str]:
    command = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise UserError(f"{tree}: {done.stderr.decode(errors='replace').strip()}")
    return sorted(name for name in set(done.stdout.decode().split("\0")) if (tree / name).is_file() and name)


def make(tree: Path) -> Bundle:
    """The same bytes for the same files: no times, no owners."""
    stream, left_out, digest, count = io.BytesIO(), [], hashlib.sha256(), 0
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for name in listed(tree):
            path = tree / name
            if secret_name(name) or outside(path, tree) or path.stat().st_size > LARGEST:
                left_out.append(name)
                continue
            content = path.read_bytes()
            if secret_text(content, path.suffix):
                left_out.append(name)
                continue
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(info, io.BytesIO(content))
            digest.update(f"{name}\0{info.mode}\0{len(content)}\0".encode() + content)
            count += 1
    return Bundle(digest.hexdigest()[:16], stream.getvalue(), count, tuple(left_out))


def secret_name(name: str) -> bool:
    path = Path(name)
    if SECRET_FOLDERS.intersection(path.parts[:-1]) or SECRET_NAMES.fullmatch(path.name):
        return True
    return path.suffix not in SOURCE and SECRET_UNLESS_SOURCE.fullmatch(path.name) is not None


def secret_text(content: bytes, suffix: str) -> bool:
    if suffix in SOURCE:
        return KEY_ITSELF.search(content) is not None or has_token(content)
    if ASSIGNED.search(content) or has_token(content):
        return True
    if suffix in (".json", "", ".txt") and ACCOUNT.search(content):
        return True
    return KEY.search(content) is not None


def has_token(content: bytes) -> bool:
    """Of a form that says itself what it is, and looks drawn by lot. Keys are looked for besides, and what
    comes after `Bearer` is an example in most files."""
    found = secret.FORMS.finditer(content.decode("latin-1"))
    return any(one[0].startswith(TOKENS) and len(set(one[0])) > 12 for one in found)


def outside(path: Path, tree: Path) -> bool:
    """A link to what is not in the tree was not meant to be sent with it."""
    return not path.resolve().is_relative_to(tree.resolve())


def push(workers: Workers, bundle: Bundle, patience: float) -> bool:
    """Whether anything had to be sent."""
    have = workers.each(f'test -d "$HOME/.headrace/trees/{bundle.name}" && echo yes || true', b"", patience)
    missing = not all("yes" in one for one in have)
    workers.each(UNPACK.format(name=bundle.name), bundle.content if missing else b"", patience)
    return missing
