"""Best-fit packing by grain, over 64 open rows, and by best-fit-decreasing over a tree of the rooms that rows
have left, one document at a time, as OLMo-core does it."""

from typing import Any

import numpy as np
from serve import serve


def get_ready() -> Any:
    def work(options: dict[str, Any]) -> dict[str, Any]:
        lengths = np.load(options["lengths"])[: options["documents"]]
        pack = with_grain if options["how"] == "grain" else with_tree
        try:
            rows = pack(lengths, options["length"])
        except ImportError as error:
            return {"missing": f"not installed: {error}"}
        return {"fill": int(lengths.sum()) / (rows * options["length"])}

    return work


def with_grain(lengths: np.ndarray, length: int) -> int:
    import grain
    from grain.experimental import BestFitPackIterDataset

    zeros = np.zeros(length, np.int32)
    source = grain.MapDataset.range(len(lengths)).map(lambda i: {"tokens": zeros[: lengths[i]]})
    packed = BestFitPackIterDataset(
        source.to_iter_dataset(), length_struct={"tokens": length}, num_packing_bins=64
    )
    return sum(1 for _ in packed)


def with_tree(lengths: np.ndarray, length: int) -> int:
    """A segment tree over free space from 0 to `length`: a node has the largest free space below it that some
    row has."""
    size = 1 << length.bit_length()
    tree = [0] * (2 * size)
    rows_by_room: list[list[int]] = [[] for _ in range(length + 1)]
    rows = 0

    def update(room: int, value: int) -> None:
        node = size + room
        tree[node] = value
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])

    def smallest(least: int) -> int:
        """The smallest free space of at least this much, 0 if there is none."""
        node = size + least
        if tree[node]:
            return least
        while node > 1:
            if node % 2 == 0 and tree[node + 1]:
                node += 1
                while node < size:
                    node = 2 * node if tree[2 * node] else 2 * node + 1
                return node - size
            node //= 2
        return 0

    for document in np.sort(lengths)[::-1].tolist():
        room = smallest(document)
        if room:
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                update(room, 0)
        else:
            room, row = length, rows
            rows += 1
        left = room - document
        if left:
            rows_by_room[left].append(row)
            if len(rows_by_room[left]) == 1:
                update(left, left)
    return rows


if __name__ == "__main__":
    serve(get_ready)
