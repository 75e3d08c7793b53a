"""Secrets are in no message and no file of a run, and data from elsewhere is read but never executed."""

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2.exceptions import SecurityError

from headrace import trackers
from headrace.cli import main as cli_main
from headrace.config import recipe
from headrace.data.chat.template import make_environment
from headrace.data.dataset import Dataset, PackedRows
from headrace.data.shards import Index
from headrace.errors import UserError
from headrace.model_formats import hf_tensors
from headrace.storage import files, lock, redact
from headrace.training import run as training_run

PACKAGE = Path(redact.__file__).parent.parent
TOKEN = "hf_" + "aB3dE6gH9" * 4


def read_batch(data: Dataset, step: int, batch_size: int, *, seed: int = 0) -> PackedRows:
    return data.batch(data.train_order(batch_size, seed=seed), step)


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("https://me:pass@host/data", "https://host/data"),
        ("https://me@host/data?page=2", "https://host/data?page=2"),
        ("https://host/x?X-Goog-Signature=abc&a=1", "https://host/x?***"),
        ("https://host/x?sv=2&sig=abc%3D", "https://host/x?***"),
        ("https://host/x?access_token=abc", "https://host/x?***"),
        ("https://host/x?download=true", "https://host/x?download=true"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("/home/me@work/token", "/home/me@work/token"),
    ],
)
def test_urls_are_shown_without_credentials_and_signatures(url: str, redacted: str) -> None:
    assert redact.redact_url(url) == redacted == files.redacted(url)
    assert (redact.find_url_secret(url) is None) == (url == redacted)
    assert redact.redact(f"error: {url} failed") == f"error: {redacted} failed"


def test_messages_are_redacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_PASSWORD", "correct horse")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "perhaps-not")
    monkeypatch.setenv("MY_TOKEN", str(tmp_path))  # the path of a secret is not a secret
    text = f"0123456789abcdef, correct horse, {TOKEN}, perhaps-not, {tmp_path}, Bearer ya.x-12345678"
    assert redact.redact(text) == f"***, ***, ***, perhaps-not, {tmp_path}, Bearer ***"
    key = "-----BEGIN PRIVATE KEY-----\nabc\ndef\n-----END PRIVATE KEY-----"
    assert redact.redact(f"a {key} b") == "a *** b"


def test_neither_the_log_nor_the_terminal_has_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-token")
    trackers_ = trackers.make_trackers(tmp_path, total_steps=1)
    trackers_.event("cannot connect to https://me:pass@host/x with a-secret-token", "warning")
    trackers_.close()
    for text in ((tmp_path / "log.txt").read_text(), capsys.readouterr().out):
        assert "cannot connect to https://host/x with ***" in text


def test_errors_and_crashes_are_reported_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_main.main(["eval", f"nowhere-{TOKEN}"]) == 2
    errors = capsys.readouterr().err
    assert "nowhere-***" in errors and TOKEN not in errors
    program = "import sys\nfrom headrace.storage import redact\nsys.excepthook = redact.excepthook\n"
    program += f"raise ValueError('https://me:pass@host/ {TOKEN}')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        "ValueError: https://host/ ***" in result.stderr
        and "pass" not in result.stderr.split("ValueError")[-1]
    )


def test_a_recipe_with_a_secret_in_a_url_is_refused_without_showing_the_secret(tiny, tmp_path: Path) -> None:
    for override in ("data.path", "run_dir", "init_from"):
        with pytest.raises(
            UserError, match="found https://host/x, expected a URL without a user name"
        ) as error:
            tiny(f"{override}=https://me:pass@host/x")
        assert "pass@" not in str(error.value)
    (tmp_path / "data.yaml").write_text(
        f"path: {tmp_path}/data\nsources: {{a: {{path: 'https://host/x?X-Amz-Signature=abc'}}}}\n"
    )
    with pytest.raises(
        UserError, match=r"data.yaml:2: sources.a.path: found https://host/x\?\*\*\*"
    ) as error:
        recipe.load_data(tmp_path / "data.yaml")
    assert "abc" not in str(error.value)


def test_no_file_of_a_run_contains_environment_secrets(
    tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "GOOGLE_PASSWORD"):
        monkeypatch.setenv(name, f"secret-of-{name.lower()}")
    cfg = tiny("schedule.steps=1", "schedule.warmup=0", "log.tensorboard=true")
    assert training_run.run(cfg) == 0
    run_files = [path for path in Path(cfg.run_dir).rglob("*") if path.is_file()]
    assert len(run_files) > 20
    assert not [path for path in run_files if b"secret-of-" in path.read_bytes()]


UNSAFE = {
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads", "shelve.open",
    "torch.load", "joblib.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec",
    "os.system",
    "os.popen", "tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive", "jsonpickle.decode", "dill.load",
}  # fmt: skip
ALLOWED = {
    ("reader.py", "exec"),  # a class of this repository, without importing JAX
    ("bundle.py", "tarfile"),  # writes an archive, and opens none
    ("bundle.py", "tarfile.open"),
    ("workers.py", "WorkerAddress(shell)"),  # a field of our dataclass: the command that reaches a worker
}
FLAGS = {"allow_pickle", "trust_remote_code", "shell"}


def test_no_loader_unpickles_unpacks_or_executes_files() -> None:
    """Checks all modules of the package. Only `--program` loads compiled programs, which the user names."""
    found = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in UNSAFE:
                    found.add((file.name, name))
                for flag in node.keywords:
                    if flag.arg in FLAGS and not (
                        isinstance(flag.value, ast.Constant) and not flag.value.value
                    ):
                        found.add((file.name, f"{name}({flag.arg})"))
                    if flag.arg == "weights_only" and ast.unparse(flag.value) != "True":
                        found.add((file.name, name))
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                found |= {
                    (file.name, name)
                    for name in names
                    if name.split(".")[0] in ("pickle", "tarfile", "zipfile", "shelve", "dill")
                }
    assert found == ALLOWED


class Trap:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_arrays_with_objects_in_them_are_not_unpickled(packed: str, tmp_path: Path) -> None:
    """In shards of a dataset, and in other files of the dataset."""
    data = tmp_path / "data"
    data.mkdir()
    for file in Path(packed).iterdir():
        if file.is_file():
            (data / file.name).write_bytes(file.read_bytes())
    shard = next(data.glob("train-*[0-9].npy"))
    trap = np.array([Trap(tmp_path / "sprung")], dtype=object)
    size = shard.stat().st_size
    np.save(shard, trap, allow_pickle=True)
    shard.write_bytes(shard.read_bytes().ljust(size, b"\0")[:size])
    with pytest.raises(UserError, match=r"damaged|holds object"):
        read_batch(Dataset.open(data), 0, 2)
    assert cli_main.main(["data", "verify", str(data)]) == 2
    for name in ("index.json", "tokenizer.json"):
        (data / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        with pytest.raises(UserError):
            Dataset.open(data)
            from headrace.data.tokenizer import tokenizer as tokenizer_io

            tokenizer_io.load(data)
    assert not (tmp_path / "sprung").exists()


def test_weights_in_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(UserError, match="not a complete safetensors file"):
        hf_tensors.SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no \.safetensors file in it"):
        hf_tensors.SafetensorsFolder(tmp_path)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "name", ["../other/train-0-00000", "/etc/passwd", "a/b", "..", "", ".hidden", "a\0b"]
)
def test_an_index_that_names_files_elsewhere_is_refused(packed: str, name: str) -> None:
    index = json.loads((Path(packed) / "index.json").read_text())
    index["splits"]["train"]["epochs"][0][0]["name"] = name
    with pytest.raises(UserError, match=r"names the shard .* expected a plain name"):
        Index.parse(json.dumps(index), "index.json")
    index["splits"]["train"]["epochs"][0][0] |= {"name": "train-0-00000", "checksums": {"/../../x": "0"}}
    with pytest.raises(UserError, match="names the shard"):
        Index.parse(json.dumps(index), "index.json")


def test_a_linked_shard_must_match_the_index(packed: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for file in Path(packed).iterdir():
        if file.is_file():
            (data / file.name).symlink_to(file)
    read_batch(Dataset.open(data), 0, 2)  # links to another disk are allowed
    shard = next(data.glob("train-*[0-9].npy"))
    size = shard.stat().st_size
    shard.unlink()
    (tmp_path / "private").write_bytes(b"x" * size)
    shard.symlink_to(tmp_path / "private")
    with pytest.raises(UserError, match="damaged"):
        Dataset.open(data)


def test_the_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run/.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"\.lock"), lock.lock(str(tmp_path / "run")):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_chat_template_cannot_reach_python() -> None:
    environment = make_environment()
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ x.append(1) }}",
        "{{ f.__globals__.x }}",
    ):
        with pytest.raises(SecurityError):
            environment.from_string(text).render(x=[], f=environment.from_string)
