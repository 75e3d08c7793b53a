"""Finished layers of a quantization, one file each in a folder next to the target, so that an interrupted one
resumes."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from headrace.data import shards
from headrace.errors import UserError
from headrace.model_formats import quantized_folder
from headrace.model_formats.hf_config import HFSettings
from headrace.model_formats.quantized_folder import Linear, matrix_tensors
from headrace.nn.module import Array, PyTree
from headrace.quantize.methods import MethodConfig, QuantizedLayer, QuantizedMatrix, load_method


@dataclass(frozen=True)
class LayerCache:
    """The files of one stage of a quantization, one for each layer. `record` identifies the request, the
    weights and the data."""

    folder: Path
    linears: Sequence[Linear]
    method: MethodConfig
    record: Mapping[str, object]
    stage: str = "layer"  # prefix of the files' names

    @property
    def record_path(self) -> Path:
        return self.folder / "request.json"

    def check_record(self) -> None:
        """Raise UserError if the folder is of another request, or of other weights or data."""
        if not self.record_path.is_file():
            return
        try:
            found = json.loads(self.record_path.read_text())
        except ValueError:
            raise UserError(
                f"{self.record_path}: not valid JSON; remove the folder to start from the beginning"
            ) from None
        for key in sorted({*self.record, *found}):
            if self.record.get(key) != found.get(key):
                raise UserError(
                    f"{self.folder}: found an interrupted quantization with {key} {found.get(key)}, expected "
                    f"{self.record.get(key)}; remove the folder to start from the beginning"
                )

    def with_stage(self, stage: str) -> "LayerCache":
        """The files of another stage, in the same folder."""
        return dataclasses.replace(self, stage=stage)

    def path(self, layer: int) -> Path:
        """The file of a layer."""
        return self.folder / f"{self.stage}-{layer:05}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a layer is stored."""
        return self.path(layer).is_file()

    def save(self, layer: int, matrices: QuantizedLayer) -> None:
        """Store the matrices of a layer. The file appears when it is complete."""
        if not self.record_path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            shards.write_json(self.record_path, self.record)
        by_name = {linear.name.format(layer): matrices[linear.name] for linear in self.linears}
        tensors: dict[str, np.ndarray] = {}
        for name, matrix in by_name.items():
            tensors |= matrix_tensors(name, matrix)
        config = load_method(self.method).quantization_config(self.method, by_name)
        scratch = self.path(layer).with_suffix(".part")
        save_file(tensors, scratch, metadata={"settings": json.dumps(config)})
        scratch.rename(self.path(layer))

    def load(self, layer: int) -> dict[str, QuantizedMatrix]:
        """Read the matrices of a layer, by the names of linear layers."""
        config = self.load_config(layer)
        with safe_open(self.path(layer), framework="np") as file:
            names = set(file.keys())
            take = lambda name: file.get_tensor(name) if name in names else None
            return {
                linear.name: quantized_folder.load_matrix(config, linear.name.format(layer), take)
                for linear in self.linears
            }

    def load_config(self, layer: int) -> HFSettings:
        """Read the `quantization_config` of a layer."""
        with safe_open(self.path(layer), framework="np") as file:
            return json.loads(file.metadata()["settings"])


def fingerprint(params: PyTree) -> str:
    """A hash of weights, from sums of their bits, which are the same in any order and thus on any mesh."""

    @jax.jit
    def sum_bits(params: PyTree) -> list[Array]:
        to_bits = lambda w: jax.lax.bitcast_convert_type(w.astype(jnp.float32), jnp.uint32)
        leaves = map(to_bits, jax.tree.leaves(params))
        return [jnp.sum(term, dtype=jnp.uint32) for bits in leaves for term in (bits, bits * bits)]

    return hashlib.sha256(np.asarray(jax.device_get(sum_bits(params))).tobytes()).hexdigest()[:16]
