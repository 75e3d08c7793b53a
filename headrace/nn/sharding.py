"""Sharding: how arrays are split over a mesh of devices.

Only this file names mesh axes. Models name the axes of arrays (`embed`, `heads`, `batch`), and `RULES` maps
those to the mesh axes that split them."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.nn import module
from headrace.nn.module import Axes, ModelClass, PyTree

AnyMesh: TypeAlias = Mesh | AbstractMesh

AXES = ("data", "fsdp", "tensor", "context", "expert")

# Weights: `tensor` splits heads, hidden units and vocabulary, `expert` splits experts, and `fsdp`, with
# `expert` if that is not used yet, splits the model's width. Activations: `data`, `fsdp` and `expert` split
# rows, `context` splits positions.
RULES: dict[str, tuple[str, ...]] = {
    "experts": ("expert",),
    "embed": ("fsdp", "expert"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert_mlp": ("tensor",),
    "shared_mlp": ("tensor",),
    "vocab": ("tensor",),
    "batch": ("data", "fsdp", "expert"),
    "rows": ("data",),  # the batch axis of arrays whose `embed` axis is split too
    "sequence": ("context",),
}


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a mesh of the given sizes, 1 for axes that are not given, over these devices (default: all).

    Neighbors in the mesh are neighbors on a TPU's torus as far as possible. Only `data` is split over slices,
    since the network between them is slow."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"})
    if slices > 1:
        if sizes["data"] % slices:
            raise ValueError(f"data {sizes['data']} is not a multiple of the {slices} slices it must span")
        inner, outer = (sizes["data"] // slices, *shape[1:]), (slices, *(1,) * (len(shape) - 1))
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def resolve_sizes(sizes: dict[str, int | str], devices: int) -> dict[str, int]:
    """Replace the one size that is `auto` by a number. Raises ValueError if the sizes do not multiply to
    `devices`."""
    numbers = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    product = math.prod(numbers.values())
    auto = [axis for axis in sizes if axis not in numbers]
    if len(auto) > 1:
        raise ValueError(f"only one mesh axis can be auto, found {' and '.join(auto)}")
    if devices % product or (not auto and product != devices):
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"{shown} cannot be laid over {devices} device{'s' * (devices > 1)}")
    return {axis: numbers.get(axis, devices // product) for axis in sizes}


def partition_spec(names: Sequence[str | None], shape: Sequence[int], mesh: AnyMesh) -> P:
    """Make the PartitionSpec of an array with these axis names.

    An axis whose size the mesh does not divide is not split. If two axes have rules with the same mesh axis,
    the first gets it."""
    used: set[str] = set()

    def mesh_axes(name: str | None, size: int) -> tuple[str, ...] | None:
        rule = tuple(axis for axis in RULES.get(name or "", ()) if axis not in used)
        parts = math.prod(mesh.shape[axis] for axis in rule)
        if parts == 1 or size % parts:
            return None
        used.update(rule)
        return rule

    return P(*(mesh_axes(name, size) for name, size in zip(names, shape, strict=True)))


def row_sharding(mesh: Mesh, shape: tuple[int, int]) -> NamedSharding:
    """The sharding of rows [b s]."""
    return NamedSharding(mesh, partition_spec(("batch", "sequence"), shape, mesh))


def shardings(axes: PyTree, shapes: PyTree, mesh: Mesh) -> PyTree:
    """The sharding of every weight, from the model's trees of `Axes` and of shapes."""
    return jax.tree.map(
        lambda axes, leaf: NamedSharding(mesh, partition_spec(axes.names, leaf.shape, mesh)),
        axes,
        shapes,
        is_leaf=lambda node: isinstance(node, Axes),
    )


def abstract_params(model: ModelClass, cfg: object, mesh: Mesh) -> PyTree:
    """The weights of a model as shapes with shardings."""
    shapes = module.shapes(model, cfg)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings(module.axes(model, cfg), shapes, mesh),
    )


def current_mesh() -> AbstractMesh | None:
    """The mesh set by `jax.set_mesh`; None without one and on a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def context_size() -> int:
    """The number of devices over which the positions of a row are split."""
    mesh = current_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in RULES["sequence"])


def context_chunk_order(length: int) -> tuple[int, ...]:
    """The order of a row's chunks under context parallelism: of n devices, device i has chunks i and
    2n - 1 - i of 2n.

    With a causal mask the last chunk attends to 2n times as many keys as the first; this order gives all
    devices equal work. It is (0,) if positions are not split."""
    devices = context_size()
    if devices == 1 or length % (2 * devices):
        return (0,)
    return tuple(chunk for i in range(devices) for chunk in (i, 2 * devices - 1 - i))


def to_balanced_order(x: jax.Array) -> jax.Array:
    """Reorder the positions of rows [b s ...] by `context_chunk_order`.

    Applied once, to tokens and all else that goes with them, before the model; in the model only attention
    needs to know the order."""
    order = context_chunk_order(x.shape[1])
    if len(order) == 1:
        return x
    return constrain(reorder(x, order), "batch", "sequence", *(None,) * (x.ndim - 2))


def from_balanced_order(x: jax.Array) -> jax.Array:
    """Undo `to_balanced_order`."""
    order = context_chunk_order(x.shape[1])
    return reorder(x, tuple(order.index(chunk) for chunk in range(len(order))))


def reorder(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Split x along its second axis into equal parts and concatenate them in another order."""
    parts = jnp.split(x, len(order), axis=1)
    return jnp.concatenate([parts[number] for number in order], axis=1) if len(order) > 1 else x


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain how an activation is split, e.g. `constrain(x, "batch", "sequence", None)`."""
    mesh = current_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, mesh))
