"""Sources of documents: plugins, one file each, chosen by `use` in a source of a data recipe.

A source has `Config`, the keys of its section, and the functions of `Source`."""

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from headrace.data.documents import FilePart, Problems


class SourceConfig(Protocol):
    """A section of `sources` in a data recipe: the keys that all sources share. The plugin's Config adds
    others."""

    @property
    def use(self) -> str: ...

    @property
    def weight(self) -> float: ...


class Source(Protocol):
    """The functions of a module in this folder. `cfg` is the module's Config."""

    def list_parts(self, cfg: Any) -> list[FilePart]:
        """The parts into which workers divide the source, in a fixed order."""
        ...

    def read(self, cfg: Any, part: FilePart, problems: Problems) -> Iterator[pa.Table]:
        """The documents of a part, as tables with the columns of `formats.columns.DOCUMENT_SCHEMA`."""
        ...
