"""Rows of .npy files by np.memmap alone: whole batches, in order, made int32."""

from typing import Any

import numpy as np
from serve import serve


def get_ready() -> Any:
    def work(options: dict[str, Any]) -> dict[str, Any]:
        batch, tokens = options["batch"], 0
        out = None
        for file in options["files"]:
            rows = np.load(file, mmap_mode="r")
            for first in range(0, len(rows) - batch + 1, batch):
                if options["fresh"]:
                    out = rows[first : first + batch].astype(np.int32)
                else:
                    out = np.empty((batch, rows.shape[1]), np.int32) if out is None else out
                    np.copyto(out, rows[first : first + batch])
                tokens += out.size
        return {"tokens": tokens}

    return work


if __name__ == "__main__":
    serve(get_ready)
