"""torch's DataLoader over np.memmap: a row an item, batches of them, no or two worker processes."""

from typing import Any

import numpy as np
from serve import serve


def get_ready() -> Any:
    import torch
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)

    class Rows(Dataset):
        def __init__(self, file: str) -> None:
            self.rows = np.load(file, mmap_mode="r")

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, number: int) -> Any:
            return torch.from_numpy(self.rows[number].astype(np.int32))

    kept: dict[tuple[str, int], Any] = {}

    def work(options: dict[str, Any]) -> dict[str, Any]:
        workers, tokens = options["workers"], 0
        for file in options["files"]:
            key = file, workers
            if key not in kept:
                kept[key] = DataLoader(
                    Rows(file),
                    batch_size=options["batch"],
                    num_workers=workers,
                    drop_last=True,
                    persistent_workers=workers > 0,
                )
            for batch in kept[key]:
                tokens += batch.numel()
        return {"tokens": tokens}

    return work


if __name__ == "__main__":
    serve(get_ready)
