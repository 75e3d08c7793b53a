"""grain over ArrayRecord: a row a record, batches of them, with its default reading threads."""

from typing import Any

import numpy as np
from serve import serve


def get_ready() -> Any:
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    def work(options: dict[str, Any]) -> dict[str, Any]:
        if "rows_of" in options:
            writer = ArrayRecordWriter(options["out"], "group_size:1,uncompressed")
            for row in np.load(options["rows_of"], mmap_mode="r")[: options["rows"]]:
                writer.write(row.tobytes())
            writer.close()
            return {}
        source = grain.sources.ArrayRecordDataSource([options["out"]])
        batches = (
            grain.MapDataset.source(source)
            .map(lambda record: np.frombuffer(record, options["dtype"]).astype(np.int32))
            .batch(options["batch"], drop_remainder=True)
            .to_iter_dataset()
        )
        return {"tokens": sum(batch.size for batch in batches)}

    return work


if __name__ == "__main__":
    serve(get_ready)
