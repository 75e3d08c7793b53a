"""MosaicML streaming from local MDS files: a row a sample, through torch's DataLoader, no or two workers."""

from typing import Any

import numpy as np
from serve import serve


def get_ready() -> Any:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    kept: dict[int, Any] = {}

    def work(options: dict[str, Any]) -> dict[str, Any]:
        out, workers = options["out"], options.get("workers", 0)
        if "rows_of" in options:
            rows = np.load(options["rows_of"], mmap_mode="r")[: options["rows"]]
            columns = {"tokens": f"ndarray:{rows.dtype}:{rows.shape[1]}"}
            with MDSWriter(out=out, columns=columns) as writer:
                for row in rows:
                    writer.write({"tokens": np.array(row)})
            return {}
        if workers not in kept:
            data = StreamingDataset(local=out, shuffle=False, batch_size=options["batch"])
            kept[workers] = DataLoader(
                data, batch_size=options["batch"], num_workers=workers, persistent_workers=workers > 0
            )
        return {"tokens": sum(batch["tokens"].numel() for batch in kept[workers])}

    return work


if __name__ == "__main__":
    serve(get_ready)
