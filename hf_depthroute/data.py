"""Text in, packed token blocks out. Everything goes through `datasets`, which is imported only when text is loaded."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import datasets

PYTHON_STDLIB = "python-stdlib"

# Not prose-like source (tables, generated data), not installed everywhere, or not part of the library proper.
_STDLIB_SKIP = {
    "__pycache__", "config", "dist-packages", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3",
    "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip

_LOCAL_BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


class DataError(ValueError):
    """The dataset, split or column that was asked for cannot be used. The message is one line."""


def stdlib_files(split: str) -> list[Path]:
    """The standard library's own `.py` files on this machine, in path order.

    A file belongs to `"validation"` when the CRC of its relative path is divisible by 20, so that the split does not
    move when a Python release adds or removes files; all others are `"train"`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in _STDLIB_SKIP or part.startswith("config-") for part in relative.parts):
            continue
        held_out = zlib.crc32(relative.as_posix().encode()) % 20 == 0
        if held_out == (split == "validation"):
            files.append(path)
    return files


def fingerprint(texts: list[str]) -> str:
    """Twelve hex digits that identify a list of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:12]


def load_text(
    source: str,
    *,
    split: str = "train",
    name: str | None = None,
    column: str = "text",
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """A dataset with the one column `text`.

    Args:
        source: `"python-stdlib"`, a local `.txt` / `.jsonl` / `.json` / `.csv` / `.parquet` file, a folder that
            `datasets` can load, or a dataset id on the Hub.
        split: A split, or a slice of one in the syntax of `datasets` (`"train[:90%]"`).
        name: The Hub dataset's configuration, such as `"sample-10BT"`.
        column: The column that holds the text.
        streaming: Do not download the dataset; read it as it is consumed.

    Raises:
        DataError: There is no such dataset, split or column.
    """
    import datasets

    if source == PYTHON_STDLIB:
        if split not in ("train", "validation"):
            raise DataError(f"dataset {PYTHON_STDLIB}: split {split!r} does not exist; use train or validation")
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in stdlib_files(split)]
        if not texts:
            raise DataError(f"dataset {PYTHON_STDLIB}: this Python installation ships no library sources")
        dataset: Any = datasets.Dataset.from_dict({"text": texts})
        return dataset.to_iterable_dataset() if streaming else dataset

    path = Path(source)
    looks_local = path.suffix in _LOCAL_BUILDERS or source.startswith((".", "/", "~"))
    try:
        if path.is_file():
            if path.suffix not in _LOCAL_BUILDERS:
                raise DataError(f"dataset {source}: unknown file type; use one of {', '.join(_LOCAL_BUILDERS)}")
            builder = _LOCAL_BUILDERS[path.suffix]
            dataset = datasets.load_dataset(builder, data_files=str(path), split=split, streaming=streaming)
        elif looks_local and not path.exists():
            raise DataError(f"dataset {source}: no such file or folder")
        else:
            dataset = datasets.load_dataset(source, name, split=split, streaming=streaming)
    except DataError:
        raise
    except ValueError as error:  # unknown split or configuration
        raise DataError(f"dataset {source}: {_first_line(error)}") from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        offline = " (the Hub cannot be reached: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise DataError(f"dataset {source}: not found locally or on the Hub{offline}: {_first_line(error)}") from error

    columns = dataset.column_names
    if columns is not None and column not in columns:
        raise DataError(f"dataset {source}: no column {column!r}; it has {', '.join(columns)}")
    if column != "text":
        dataset = dataset.rename_column(column, "text")
    return dataset.select_columns(["text"])


def pack(
    dataset: datasets.Dataset | datasets.IterableDataset, tokenizer: Any, length: int
) -> datasets.Dataset | datasets.IterableDataset:
    """Tokenise, join with the end-of-sequence token and cut into blocks of exactly `length` tokens.

    The result has `input_ids` and `attention_mask` (all ones), each `[length]`, and `labels` equal to `input_ids`.
    The tail of each batch of 1,000 texts that does not fill a block is dropped.

    Raises:
        DataError: The text is shorter than one block.
    """
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []

    def to_blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch["text"] if text]
        stream: list[int] = []
        for ids in tokenizer(texts)["input_ids"] if texts else []:
            stream += ids + end
        blocks = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        return {"input_ids": blocks, "attention_mask": [[1] * length for _ in blocks], "labels": blocks}

    packed = dataset.map(to_blocks, batched=True, batch_size=1000, remove_columns=["text"])
    if hasattr(packed, "__len__") and len(packed) == 0:
        raise DataError(f"the text is shorter than one block of {length} tokens; use a shorter block or more text")
    return packed


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
