"""The working tree as one archive: the files that git tracks or would track, with local changes, without
secrets.

Its name is its checksum, so that nothing is sent to a worker that has it."""

import hashlib
import io
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.errors import UserError
from headrace.storage import redact
from headrace.tpu.workers import Workers

# Names and contents of files that are never sent, even if git tracks them. Source and Markdown files may have
# `token` in their name and mention keys; files of tokenizers are sent.
SECRET_FOLDERS = {".aws", ".ssh", ".gnupg", ".kaggle", ".docker", ".kube"}
SECRET_NAMES = re.compile(
    r"\.env.*|.*\.(pem|key|p12|pfx)|.*credentials.*|[._]netrc|kaggle\.json|google_compute_engine.*"
    r"|secrets?\.(ya?ml|json|toml|ini|env|txt)|\.(pypirc|npmrc|boto|s3cfg)"
)
# The same for tar's simpler patterns, in the commands of --dry-run.
SECRET_TAR_PATTERNS = (
    *sorted(SECRET_FOLDERS),
    *(".env*", "*.pem", "*.key", "*.p12", "*.pfx", "*credentials*", ".netrc", "_netrc", "kaggle.json"),
    *("google_compute_engine*", "secret.*", "secrets.*", ".pypirc", ".npmrc", ".boto", ".s3cfg", "id_*"),
    *("*api_key*", "*hf_token*"),
)
SECRET_UNLESS_SOURCE = re.compile(
    r"id_.*|(?!(special|added)_tokens).*token(?!i[sz]).*|.*api_?key.*", re.IGNORECASE
)
SOURCE = {".py", ".md"}
KEY_HEADER = re.compile(rb"PRIVATE KEY-{5}")
KEY_WITH_CONTENT = re.compile(rb"PRIVATE KEY-{5}(\s|\\n)+[A-Za-z0-9+/]{16}")
SERVICE_ACCOUNT = re.compile(rb'"private_key"\s*:|"type"\s*:\s*"(service_account|authorized_user)"')
# An assignment to a variable that holds a secret, unless its value is another variable or a placeholder.
SECRET_ASSIGNMENT = re.compile(
    rb"""(?im)^\s*(?:export\s+|-\s*)?["']?[A-Z0-9_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|(?:API|ACCESS|PRIVATE)_?KEY)["']?"""
    rb"""[ \t]*[=:][ \t]*["']?(?![$<{*]|your|x{3})[\w+/.-]{12,}["']?,?[ \t]*$"""
)
TOKEN_PREFIXES = ("hf_", "AIza", "ya29.", "AKIA", "ASIA", "gh", "sk-")
MAX_FILE_BYTES = 64 * 2**20

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
    """An archive of a working tree."""

    name: str  # checksum of the content
    content: bytes
    files: int
    skipped: tuple[str, ...]  # files that may be secret, are too large, or link out of the tree


def find_repository() -> Path:
    """The clone of Headrace that this process runs from; the workers run the same code. Raises UserError if
    it is an installed package."""
    root = Path(headrace.__file__).resolve().parents[1]
    for name in ("pyproject.toml", "constraints.txt"):
        if not (root / name).is_file():
            raise UserError(f"{root}: found no {name}, expected a clone of Headrace (pip install -e .)")
    return root


def list_files(tree: Path) -> list[str]:
    """The existing files that git tracks or would track, relative to the tree, sorted."""
    command = ["git", "-C", str(tree), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, capture_output=True)
    if result.returncode:
        raise UserError(f"{tree}: {result.stderr.decode(errors='replace').strip()}")
    return sorted(
        name for name in set(result.stdout.decode().split("\0")) if name and (tree / name).is_file()
    )


def make_bundle(tree: Path) -> Bundle:
    """Pack a working tree. The same files give the same name: times and owners are not stored."""
    stream, skipped, digest, count = io.BytesIO(), [], hashlib.sha256(), 0
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=6) as archive:
        for name in list_files(tree):
            path = tree / name
            if has_secret_name(name) or is_outside(path, tree) or path.stat().st_size > MAX_FILE_BYTES:
                skipped.append(name)
                continue
            content = path.read_bytes()
            if has_secret(content, path.suffix):
                skipped.append(name)
                continue
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
            archive.addfile(info, io.BytesIO(content))
            digest.update(f"{name}\0{info.mode}\0{len(content)}\0".encode() + content)
            count += 1
    return Bundle(digest.hexdigest()[:16], stream.getvalue(), count, tuple(skipped))


def has_secret_name(name: str) -> bool:
    """Whether a file probably holds a secret, by its path in the tree."""
    path = Path(name)
    if SECRET_FOLDERS.intersection(path.parts[:-1]) or SECRET_NAMES.fullmatch(path.name):
        return True
    return path.suffix not in SOURCE and SECRET_UNLESS_SOURCE.fullmatch(path.name) is not None


def has_secret(content: bytes, suffix: str) -> bool:
    """Whether the content of a file probably holds a secret. `suffix` is that of its name."""
    if suffix in SOURCE:
        return KEY_WITH_CONTENT.search(content) is not None or has_token(content)
    if SECRET_ASSIGNMENT.search(content) or has_token(content):
        return True
    if suffix in (".json", "", ".txt") and SERVICE_ACCOUNT.search(content):
        return True
    return KEY_HEADER.search(content) is not None


def has_token(content: bytes) -> bool:
    """Whether there is a token with a known prefix that looks random. Keys are searched for separately, and
    the text after `Bearer` is an example in most files."""
    matches = redact.KNOWN_TOKENS.finditer(content.decode("latin-1"))
    return any(match[0].startswith(TOKEN_PREFIXES) and len(set(match[0])) > 12 for match in matches)


def is_outside(path: Path, tree: Path) -> bool:
    """Whether a path leads out of the tree through a link."""
    return not path.resolve().is_relative_to(tree.resolve())


def send_if_missing(workers: Workers, bundle: Bundle, *, retry_seconds: float) -> bool:
    """Unpack the bundle on all workers. Return whether it had to be sent: not if all of them have it
    already."""
    test = f'test -d "$HOME/.headrace/trees/{bundle.name}" && echo yes || true'
    answers = workers.run_on_all(test, retry_seconds=retry_seconds)
    is_missing = not all("yes" in answer for answer in answers)
    content = bundle.content if is_missing else b""
    workers.run_on_all(UNPACK.format(name=bundle.name), content, retry_seconds=retry_seconds)
    return is_missing
