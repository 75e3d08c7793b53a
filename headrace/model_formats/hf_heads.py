"""Classification heads of transformers: class names, tensors and pooling."""

from dataclasses import dataclass

from headrace.model_formats.hf_tensors import TensorTable

EACH_TOKEN = "each"  # the pooling of models that label every token


@dataclass(frozen=True)
class Head:
    """A class of transformers with a head for labels.

    `architecture` may hold a `*`, which stands for the name that the family's class for text generation
    begins with. A head whose `table` has `w_pool` passes the pooled state through that matrix. `pooling` maps
    our ways to pool to transformers' names of them, or to "" where config.json does not name it."""

    architecture: str
    table: TensorTable
    pooling: dict[str, str]


@dataclass(frozen=True)
class HeadLayout:
    """A family's classes with a head for labels: one labels texts, the other each token."""

    texts: Head
    tokens: Head
    drops: tuple[str, ...] = ()  # the family's weights that only predict tokens
    applies_lm_head: bool = False  # states pass through the model's own `head` first
    pooling_key: str | None = None  # config.json's name of the pooling

    def head(self, pooling: str) -> Head:
        """The class that has this kind of pooling."""
        return self.tokens if pooling == EACH_TOKEN else self.texts


def linear_tensors(name: str, hf_name: str, bias: bool = True) -> TensorTable:
    """The tensors of a head's linear layer; `name` is `classes` or `pool`."""
    pattern = "c d -> d c" if name == "classes" else "e d -> d e"
    table = {f"w_{name}": (f"{hf_name}.weight", pattern)}
    return table | ({f"b_{name}": (f"{hf_name}.bias", "c -> c")} if bias else {})


def default_layout(name: str = "*") -> HeadLayout:
    """The layout of most decoders: a score of the last token, or of each."""
    texts = Head(
        f"{name}ForSequenceClassification", linear_tensors("classes", "score", bias=False), {"last": ""}
    )
    tokens = Head(f"{name}ForTokenClassification", linear_tensors("classes", "score"), {EACH_TOKEN: ""})
    return HeadLayout(texts, tokens, drops=("head", "w_head", "head_norm", "head_bias"))
