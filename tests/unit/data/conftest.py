"""Small stand-in files in the formats that `load` reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pictures import WriteParquet, encoded, picture


@pytest.fixture
def write_parquet() -> WriteParquet:
    """Write columns as a Hugging Face style Parquet file, with class names in the schema."""

    def write(path: Path, columns: dict[str, list[Any]], names: list[str] | None = None) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table(columns)
        if names is not None:
            features = {"label": {"names": names, "_type": "ClassLabel"}}
            metadata = json.dumps({"info": {"features": features}}).encode()
            table = table.replace_schema_metadata({b"huggingface": metadata})
        pq.write_table(table, path)
        return path

    return write


@pytest.fixture
def image_folder(tmp_path: Path, write_parquet: WriteParquet) -> Path:
    """`pictures/{train,test}.parquet` with 6 and 4 images of 2 classes."""
    folder = tmp_path / "pictures"
    for split, count in (("train", 6), ("test", 4)):
        cells = [{"bytes": encoded(picture(number)), "path": None} for number in range(count)]
        labels = [number % 2 for number in range(count)]
        write_parquet(folder / f"{split}.parquet", {"image": cells, "label": labels}, ["cat", "dog"])
    return folder
