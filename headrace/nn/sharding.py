"""Which devices hold what. The only file that names mesh axes: models speak of `embed`, `heads`,
`batch`, and the rules below say over which mesh axes each is split."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.nn import module
from headrace.nn.module import Axes

AXES = ("data", "fsdp", "tensor", "context", "expert")

# Weights: split over `tensor` where a matrix has heads, hidden units or vocabulary, over `expert` where there
# is one for each expert, and over `fsdp`, and over `expert` where that is free, along the model width.
# Activations: rows over `data`, `fsdp` and `expert`, positions over `context`.
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
    "rows": ("data",),  # the batch, where it stands beside an `embed` that is still split
    "sequence": ("context",),
}


def make(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the given sizes, 1 where none is given, over these devices (all of them by default).
    Neighbours in the mesh are neighbours on a TPU's torus, as far as can be; several slices are told apart by
    `data` alone, since what lies between them is slow."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(device, "slice_index", 0) for device in devices if device.platform == "tpu"})
    if slices > 1:
        if sizes["data"] % slices:
            raise ValueError(
                f"data {sizes['data']} is not a multiple of the {slices} slices it must tell apart"
            )
        inner, outer = (sizes["data"] // slices, *shape[1:]), (slices, *(1,) * (len(shape) - 1))
        laid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    else:
        laid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(laid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def resolve(sizes: dict[str, int | str], devices: int) -> dict[str, int]:
    """Fills in the one axis that is `auto`. Raises ValueError when the sizes do not multiply to `devices`."""
    known = {axis: size for axis, size in sizes.items() if isinstance(size, int)}
    product = math.prod(known.values())
    free = [axis for axis in sizes if axis not in known]
    if len(free) > 1:
        raise ValueError(f"only one mesh axis can be auto, found {' and '.join(free)}")
    if devices % product or (not free and product != devices):
        asked = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise ValueError(f"{asked} cannot be laid over {devices} device{'s' * (devices > 1)}")
    return {axis: known.get(axis, devices // product) for axis in sizes}


def spec(names: Sequence[str | None], shape: Sequence[int], mesh: Any) -> P:
    """How an array with these axis names is split. An axis that does not divide evenly stays whole, and of
    two that go over the same part of the mesh the first has it."""
    taken: set[str] = set()

    def axis(name: str | None, size: int) -> tuple[str, ...] | None:
        rule = tuple(axis for axis in RULES.get(name or "", ()) if axis not in taken)
        split = math.prod(mesh.shape[axis] for axis in rule)
        if split == 1 or size % split:
            return None
        taken.update(rule)
        return rule

    return P(*(axis(name, size) for name, size in zip(names, shape, strict=True)))


def row_sharding(mesh: Mesh, shape: tuple[int, int]) -> NamedSharding:
    """Of a batch of rows."""
    return NamedSharding(mesh, spec(("batch", "sequence"), shape, mesh))


def shardings(axes: Any, shapes: Any, mesh: Mesh) -> Any:
    """The sharding of every weight, from a tree of `Axes` and the tree of shapes beside it."""
    return jax.tree.map(
        lambda axes, leaf: NamedSharding(mesh, spec(axes.names, leaf.shape, mesh)),
        axes,
        shapes,
        is_leaf=lambda node: isinstance(node, Axes),
    )


def placed(model: Any, cfg: Any, mesh: Mesh) -> Any:
    """The weights of a model as shapes with shardings."""
    shapes = module.shapes(model, cfg)
    return jax.tree.map(
        lambda leaf, home: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home),
        shapes,
        shardings(module.axes(model, cfg), shapes, mesh),
    )


def current() -> Any | None:
    """The mesh set by `jax.set_mesh`, or None outside of one and on a single device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 else mesh


def parts_of_a_row() -> int:
    """Over how many devices the positions of a row are split."""
    mesh = current()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in RULES["sequence"])


def chunks(length: int) -> tuple[int, ...]:
    """The chunks of a row of so many positions in the order in which the devices of `context` hold them: of
    n devices, number i has chunks i and 2n - 1 - i of 2n. Causally the last chunk sees 2n times as much as
    the first, and so all devices have equally much to do. In order, (0,), where nothing is split in two."""
    devices = parts_of_a_row()
    if devices == 1 or length % (2 * devices):
        return (0,)
    return tuple(chunk for i in range(devices) for chunk in (i, 2 * devices - 1 - i))


def balance(x: jax.Array) -> jax.Array:
    """Rows [b s ...] with their positions in the order of `chunks`, which is that of all that a model sees on
    a mesh. Tokens are put in it once, before the model; attention knows of it, and nothing else asks."""
    order = chunks(x.shape[1])
    if len(order) == 1:
        return x
    return constrain(reorder(x, order), "batch", "sequence", *(None,) * (x.ndim - 2))


def restore(x: jax.Array) -> jax.Array:
    """What `balance` was given."""
    order = chunks(x.shape[1])
    return reorder(x, tuple(order.index(chunk) for chunk in range(len(order))))


def reorder(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """The equal parts of x along its second axis in another order."""
    parts = jnp.split(x, len(order), axis=1)
    return jnp.concatenate([parts[number] for number in order], axis=1) if len(order) > 1 else x


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins an activation's layout, e.g. `constrain(x, "batch", "sequence", None)`."""
    mesh = current()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, spec(names, x.shape, mesh))
