"""What a layer keeps of a token for its backward pass and what it moves through memory, by arithmetic: arrays
counted one by one. What JAX keeps is told by `jax.vjp`, against which tests hold it."""

from dataclasses import astuple, dataclass
from typing import Any

from headrace.training import setup as build
from headrace.nn import module
from headrace.config import sections
from headrace.nn.stack import products_of
from headrace.objectives import file

# Bits that an activation's derivative is kept in, where it is one of them (layers/activations.py).
BITS = {"gelu_bits": 2, "silu_bits": 2, "relu_bits": 1}
# Of x, which a product in 8 bits keeps for the weight's gradient, bytes (products/fp8.py and its neighbours);
# None: as it is.
NARROW_INPUTS = {"compute": None, "fp8": 1, "ternary": 1, "int8": None}


@dataclass(frozen=True)
class Units:
    """Numbers of a token and layer in the compute dtype: so many times the width, the MLP's hidden units,
    queries, keys and values together, and what attention gives."""

    width: float = 0.0
    hidden: float = 0.0
    heads: float = 0.0
    mixed: float = 0.0

    def __add__(self, other: "Units") -> "Units":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Units(*(one + another for one, another in pairs))

    def __mul__(self, factor: float) -> "Units":
        return Units(*(one * factor for one in astuple(self)))

    def count(self, model: Any, tensor: int, lanes: int = 1) -> float:
        """On one of the devices that `mesh.tensor` shares a layer out over, where a head of what attention
        gives takes a multiple of `lanes`. Narrow ones of what it takes do not (attention/splash.py)."""
        head, mixed = model.head_dim, -(-model.head_dim // lanes) * lanes
        each = self.heads * (model.heads + 2 * model.kv_heads) * head + self.mixed * model.heads * mixed
        return self.width * model.embed + (self.hidden * hidden_units(model) + each) / tensor


@dataclass(frozen=True)
class Layer:
    """What arithmetic has to know of a recipe's layers beside their sizes."""

    item: int  # bytes of a number in the compute dtype
    products: str
    activation: str
    gates: int  # matrices that lead to the hidden units: two with a gate
    frozen: bool  # w_down is not trained

    @classmethod
    def of(cls, cfg: sections.Run) -> "Layer":
        axes = module.axes(file("models", cfg.model).Model, cfg.model)
        parts = {name: name.split(".") for name, _ in module.named(axes)}
        still = build.frozen(cfg, axes)
        return cls(
            item=2 if cfg.memory.compute == "bfloat16" else 4,
            products=products_of(cfg),
            activation=getattr(cfg.model, "activation", ""),
            gates=2 if any("w_gate" in one for one in parts.values()) else 1,
            frozen=all(name in still for name, one in parts.items() if "w_down" in one),
        )

    def kept(self, remat: str, *, looped: bool) -> Units:
        """Beside the layer's input: `attention` keeps what its kernel gives, `dots` what matrices give but
        the last, whose output is the next layer's input, `none` also what norms make of it. In a loop what
        attention gives is kept twice, as its kernel has it and turned round, as w_o reads it: XLA does not
        see that they are one."""
        if remat == "attention":
            return Units(mixed=1)
        if remat == "dots":
            return Units(width=1, hidden=self.gates, heads=1)
        if remat != "none":
            return Units()
        # The stream amid the layer, what two norms make of it, and what attention gives.
        if (narrow := NARROW_INPUTS[self.products]) is None:
            return Units(3, self.kept_of_mlp(), heads=1, mixed=2 if looped else 1)
        short = narrow / self.item  # of what attention gives both are kept
        return Units(1 + 2 * short, self.kept_of_mlp(), heads=1, mixed=1 + short)

    def kept_of_mlp(self) -> float:
        """Numbers for each hidden unit without remat (layers/mlp.py): with a gate both products, from which
        the unit is made again, but where w_down is in 8 bits, which keeps what it reads; without a gate what
        the activation keeps and what the gradient of w_down takes, if it has one."""
        bits = BITS.get(self.activation, 0) / (8 * self.item)
        if self.products == "compute":
            if self.gates == 2:
                return 2.0
            return bits + (0 if self.frozen else 1) if bits else 1.0
        narrow = NARROW_INPUTS[self.products]
        read = 1.0 if narrow is None else narrow / self.item
        if self.gates == 2:
            return 2 + read
        if bits:
            return bits + read
        if self.activation in ("gelu", "silu"):
            return 3 + read  # not computed again there, so that JAX keeps what lies between
        return 1 + (0 if narrow is None else read)

    def worked_on(self) -> Units:
        """Of the one layer that is at work, at the worst moment."""
        return Units(width=5, hidden=self.gates + 1, heads=3)

    def passes(self, remat: str) -> Units:
        """What elementwise work reads and writes. Forward: a norm reads and writes, twice, with the sum
        before it, and so do rotations, and the activation reads what matrices gave and writes what the next
        takes; backward each of them reads the gradient as well. What is computed again is read and written
        again. In 8 bits what is to be rounded is
        read twice, for its largest number and to be rounded, and written as a byte: three inputs and two
        gradients of the width, the hidden units and the gradients of what leads to them, and of the heads."""
        forward = Units(width=9, hidden=self.gates + 1, heads=2)
        backward = Units(width=11, hidden=2 * self.gates + 2, heads=2)
        found = forward + backward + (forward if remat != "none" else Units())
        if self.products != "compute":
            found += Units(width=5, hidden=1 + self.gates, heads=1) * (2 + 1 / self.item)
        return found


def hidden_units(model: Any) -> int:
    """That a token meets in a layer."""
    if not getattr(model, "experts", 0):
        return model.mlp
    return model.top_k * model.expert_mlp + model.shared_mlp
