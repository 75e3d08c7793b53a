"""Eight simulated CPU devices, no accelerator, no network; `--slow` also runs slow tests."""

import importlib.util
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support import xla_flags

# Tests close terminals and send Ctrl-C, even in the background or under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Without .pyc files, each of hundreds of processes would compile all modules and rewrite all asserts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags.flags(8)
os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE"
)  # torch's bf16 crashes on CPUs that report AMX wrongly
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import pytest

from tests.support.compilation_cache import no_compilation_cache as no_compilation_cache
from tests.support.compilation_cache import use_compilation_cache
from tests.support.cpu_time import CpuTimes
from tests.support.faults import FAULTS
from tests.support.shared_folder import build_once

if TYPE_CHECKING:
    from tests.support.fake_gcs import Store


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--cpu-times", metavar="FILE", help="write the CPU seconds of every test to a JSON file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTimes(config.getoption("--cpu-times")))
    if config.pluginmanager.has_plugin("cacheprovider"):
        use_compilation_cache(config.cache, is_worker=hasattr(config, "workerinput"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since many tests wait for processes."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        variants: Counter[str] = Counter()
        for item in items:
            for mark in item.iter_markers("thin"):  # of a grid of variants, every nth is quick
                name = item.nodeid.partition("[")[0]
                if variants[name] % mark.args[0]:
                    item.add_marker("slow")
                variants[name] += 1
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow (make test-all)"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties += [("fault", mark.args[0]) for mark in item.iter_markers("fault")]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `-m fault`, print the table of injected faults and their outcomes."""
    if config.getoption("markexpr") != "fault":
        return
    reports_by_fault: dict[int, list[Any]] = {number: [] for number in FAULTS}
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "fault" in properties and (report.when == "call" or report.outcome != "passed"):
                reports_by_fault[properties["fault"]].append(report)
    for number, (fault, expected) in FAULTS.items():
        outcomes = Counter(report.outcome for report in reports_by_fault[number])
        properties = [dict(report.user_properties).get("seen") for report in reports_by_fault[number]]
        summary = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()) or "not tested"
        notes = "".join(f"; {note}" for note in properties if note)
        terminalreporter.write_line(f"| {number} | {fault} | {expected} | {summary}{notes} |")


@pytest.fixture
def libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The TPU compiler, for a test and its subprocesses: `make test-all` installs it into a separate folder;
    on a TPU machine it is an installed package."""
    library = Path(__file__).parent.parent / ".venv" / "libtpu" / "libtpu" / "libtpu.so"
    if library.is_file():
        monkeypatch.setenv("TPU_LIBRARY_PATH", str(library))
    elif importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: make .venv/libtpu")
    # libtpu reads XLA_FLAGS when it is loaded, and ends the process at an unknown flag.
    monkeypatch.delenv("XLA_FLAGS")


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of packed data: a few hundred short texts, a vocabulary of 300, rows of 64 tokens."""
    from tests.support.runs import prepare_texts

    return str(build_once(tmp_path_factory, "packed", prepare_texts) / "data")


@pytest.fixture(scope="session")
def trained_recipe(packed: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe file of a small trained run, for tests of what comes after training. Its run folder must not
    change."""
    from tests.support.runs import train_small_run

    folder = build_once(tmp_path_factory, "trained", lambda folder: train_small_run(folder, packed))
    return folder / "recipe.yaml"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory):
    """Load, with overrides, the recipe of a run trained on Python's library for 200 steps: a model whose
    weights all matter. For slow tests."""
    from headrace.config import recipe
    from headrace.data.pipeline.prepare import prepare
    from headrace.training import run as training_run

    root = tmp_path_factory.mktemp("library")
    (root / "data.yaml").write_text(
        f"path: {root}/data\nsources: {{python: {{use: python_library}}}}\n"
        "tokenizer: {use: bpe, vocab: 1024}\npack: {sequence_length: 128, eval_fraction: 0.02}\n"
    )
    prepare(recipe.load_data(root / "data.yaml"), lambda line: None)
    (root / "recipe.yaml").write_text(f"""
run_dir: {root}/run
model: {{use: llama, layers: 2, embed: 128, heads: 4, kv_heads: 2, mlp: 384, rope_theta: 10000.0}}
data: {{path: {root}/data, sequence_length: 128}}
optimizer: {{use: adamw, learning_rate: 5e-3, weight_decay: 0.1}}
schedule: {{use: cosine, steps: 200, warmup: 20}}
batch: {{sequences: 16}}
mesh: {{fsdp: 1, data: auto}}
compute: {{dtype: float32}}
eval: {{every: 0, batches: 8}}
log: {{every: 50, tensorboard: false}}
""")
    load = lambda *overrides: recipe.load(root / "recipe.yaml", list(overrides))
    assert training_run.run(load()) == 0
    return load


@pytest.fixture
def tiny(packed: str, tmp_path):
    """Load a small training recipe for the packed data, with overrides."""
    from headrace.config import recipe

    text = f"""
run_dir: {tmp_path}/run
model: {{use: llama, layers: 2, embed: 32, heads: 4, kv_heads: 2, mlp: 64, rope_theta: 10000.0}}
data: {{path: {packed}, sequence_length: 64}}
optimizer: {{use: adamw, learning_rate: 1e-2, weight_decay: 0.1}}
schedule: {{use: cosine, steps: 12, warmup: 2}}
batch: {{sequences: 8}}
mesh: {{fsdp: 1, data: auto}}
compute: {{dtype: float32}}
checkpoint: {{every: 6}}
eval: {{every: 0, batches: 2}}
log: {{every: 1, tensorboard: false}}
"""
    (tmp_path / "recipe.yaml").write_text(text)
    return lambda *overrides: recipe.load(tmp_path / "recipe.yaml", list(overrides))


@pytest.fixture
def demo_run(tmp_path, monkeypatch):
    """A working directory with a run folder `runs/demo`, which recipes/lora-demo.yaml starts from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/demo").mkdir(parents=True)
    demo = Path(__file__).parent.parent / "recipes/demo.yaml"
    shutil.copyfile(demo, tmp_path / "runs/demo/recipe.yaml")


@pytest.fixture(scope="session")
def server() -> Iterator["Store"]:
    """A fake Google Cloud Storage with a bucket, shared by all tests of a process, since tensorstore reads
    its address only once."""
    from tests.support.fake_gcs import running

    with running("bucket") as store:
        yield store


@pytest.fixture
def bucket(server: "Store", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Store"]:
    """The fake Google Cloud Storage, empty and without faults, and a client that retries at once."""
    import fsspec

    from headrace.storage import files

    server.faults.clear()
    server.requests.clear()
    server.buckets["bucket"].clear()
    server.clock = 0.0
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "FIRST_WAIT", 0.01)
    files.prepare_gcsfs()
    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=_no_wait))
    yield server
    server.faults.clear()


async def _no_wait(seconds: float) -> None:
    pass
