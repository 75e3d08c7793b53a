"""JAX's persistent compilation cache for the tests: hundreds of them compile the same tiny programs, in this
process, in the workers of xdist, and in processes that they start."""

import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_BYTES = 2**30


def use_compilation_cache(cache: pytest.Cache, *, is_worker: bool) -> None:
    """Let JAX, which must not be imported yet, keep what it compiles in pytest's cache. There is a folder for
    each kind of CPU: instructions of one may be missing on another."""
    folder = cache.mkdir(f"jax-{zlib.crc32(cpu_features()):08x}")
    if not is_worker and sum(file.stat().st_size for file in folder.iterdir()) > MAX_BYTES:
        shutil.rmtree(folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def cpu_features() -> bytes:
    """The instruction sets of this machine, as far as the system lists them."""
    file = Path("/proc/cpuinfo")
    lines = file.read_bytes().splitlines() if file.exists() else []
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """Compile everything, for tests of what the compiler says or how long it takes."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
