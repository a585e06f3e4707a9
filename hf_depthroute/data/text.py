"""Text in, packed token blocks out.

Everything goes through `datasets`, which is imported only when text is loaded.
"""

from __future__ import annotations

import errno
import logging
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files.hub import HubError, explain
from ..files.shown import OneLine, reason

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

PYTHON_STDLIB = "python-stdlib"

# Not prose-like source (tables, generated data), not installed everywhere, or not part of the
# library proper.
_STDLIB_SKIP = {
    "__pycache__",
    "config",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
}

_LOCAL_BUILDERS = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}


class DataError(OneLine, ValueError):
    """The dataset, split, column or text that was asked for cannot be used.

    When the Hub is the reason, the cause is a `hf_depthroute.files.hub.HubError`.
    """


def stdlib_files(split: str) -> list[Path]:
    """The standard library's own `.py` files on this machine, in path order.

    A file belongs to `"validation"` when the CRC of its relative path is divisible by 20, so that
    the split does not move when a Python release adds or removes files; all others are `"train"`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = ((path, path.relative_to(root)) for path in sorted(root.rglob("*.py")))
    return [
        path
        for path, relative in found
        if not any(part in _STDLIB_SKIP or part.startswith("config-") for part in relative.parts)
        and (zlib.crc32(relative.as_posix().encode()) % 20 == 0) == (split == "validation")
    ]


def is_local_file(source: str) -> bool:
    """Whether `load_text` takes `source` for a file, by its name."""
    return Path(source).suffix in _LOCAL_BUILDERS


def check_source(source: str) -> Path:
    """`source` as a path, after the checks that need no library.

    Raises:
        DataError: It is a file of an unknown type or an empty one, or looks like a path and is not
            there.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in _LOCAL_BUILDERS:
            raise DataError(
                f"dataset {source}: unknown file type; use one of {', '.join(_LOCAL_BUILDERS)}"
            )
        if path.stat().st_size == 0:
            raise DataError(f"dataset {source}: the file is empty")
    elif not path.exists() and (is_local_file(source) or source.startswith((".", "/", "~"))):
        raise DataError(f"dataset {source}: no such file or folder")
    return path


def load_text(
    source: str,
    *,
    split: str = "train",
    name: str | None = None,
    column: str = "text",
    streaming: bool = False,
    verbose: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """A dataset with the one column `text`.

    Caches go to the `datasets` cache, never next to the file.

    Args:
        source: `"python-stdlib"`, a local `.txt` (each line is a text) / `.jsonl` / `.json` /
            `.csv` / `.parquet` file, a folder that `save_to_disk` made or that `datasets` can load,
            or a dataset id on the Hub.
        split: A split, or a slice of one in the syntax of `datasets` (`"train[:90%]"`; when
            streaming, of `"python-stdlib"` and saved folders only). A local file is one split,
            `"train"`.
        name: The Hub dataset's configuration, such as `"sample-10BT"`.
        column: The column that holds the text.
        streaming: Do not download the dataset; read it as it is consumed.
        verbose: Show the progress bars and the log lines of `datasets`.

    Raises:
        DataError: There is no such dataset, split or column; the Hub cannot be reached; the file is
            broken or empty; the column does not hold text.
    """
    path = Path(source).expanduser()
    if name is not None and (source == PYTHON_STDLIB or path.is_file() or _is_saved(path)):
        raise DataError(
            f"dataset {source}: has no configuration {name!r}, as a dataset of the Hub may; leave "
            "the name out"
        )
    with _progress(verbose):
        if source == PYTHON_STDLIB:
            dataset = _stdlib(split, streaming)
        else:
            dataset = _load(source, split, name, streaming)
    columns = dataset.column_names
    features = dataset.features
    if columns is None:  # a stream of unknown columns
        first = next(iter(dataset), None)
        if first is None:
            raise DataError(f"dataset {source}: it is empty")
        columns = list(first)
    if column not in columns:
        raise DataError(f"dataset {source}: no column {column!r}; it has {', '.join(columns)}")
    kind = getattr((features or {}).get(column), "dtype", "string")
    if kind not in ("string", "large_string"):
        raise DataError(
            f"dataset {source}: column {column!r} holds {kind}, not text; its columns: "
            f"{', '.join(columns)}"
        )
    if column != "text":
        dataset = dataset.select_columns([column]).rename_column(column, "text")
    return dataset.select_columns(["text"])


def pack(
    dataset: datasets.Dataset | datasets.IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    verbose: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """Tokenise, join and cut into blocks of exactly `length` tokens.

    Where the tokenizer puts tokens before a text, every block begins with them, as every prompt
    does: some models, such as Gemma, read other rows much worse. Where it puts none, before or
    behind, texts are separated by the end token.

    The result has `input_ids` and `attention_mask` (all ones), each `[length]`, and `labels` equal
    to `input_ids`. The tail of each batch of 1,000 texts that does not fill a block is dropped. A
    streaming dataset is packed as it is consumed, after its first block has been looked at.

    Raises:
        DataError: `length` is below 2, or no more than what is put before a text; the text is
            shorter than one block, or it is not text.
    """
    begin, behind = _put_around(tokenizer)
    if length < 2 or length <= len(begin):
        raise DataError(
            f"block length {length} must be at least {max(2, len(begin) + 1)} tokens: the loss is "
            "on the next token"
        )
    end = []
    if not begin and not behind and tokenizer.eos_token_id is not None:
        end = [tokenizer.eos_token_id]

    def to_blocks(batch: dict[str, list[object]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch["text"] if text]
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"the text column holds {type(text).__name__}, not text")
        stream: list[int] = []
        for ids in tokenizer(texts, verbose=False)["input_ids"] if texts else []:
            stream += ids + end
        blocks = _cut(stream, length, begin)
        return {
            "input_ids": blocks,
            "attention_mask": [[1] * length for _ in blocks],
            "labels": blocks,
        }

    with _progress(verbose):
        packed = dataset.map(to_blocks, batched=True, batch_size=1000, remove_columns=["text"])
    if next(iter(packed), None) is None:
        raise DataError(
            f"the text is shorter than one block of {length} tokens; use a shorter block or more "
            "text"
        )
    return packed


def _put_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before a text, and behind it."""
    text = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    whole = tokenizer("a", verbose=False)["input_ids"]
    for start in range(len(whole) - len(text) + 1):
        if whole[start : start + len(text)] == text:
            return whole[:start], whole[start + len(text) :]
    return [], []


def _cut(stream: list[int], length: int, begin: list[int]) -> list[list[int]]:
    """Blocks of `length` tokens that all begin with `begin`, of fewer tokens."""
    blocks: list[list[int]] = []
    start = 0
    while True:
        added = begin
        if stream[start : start + len(begin)] == begin:
            added = []
        block = added + stream[start : start + length - len(added)]
        if len(block) < length:
            return blocks
        blocks.append(block)
        start += length - len(added)


def _is_saved(path: Path) -> bool:
    """Whether `save_to_disk` made this folder."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _load(source: str, split: str, name: str | None, streaming: bool) -> Any:
    import datasets

    path = check_source(source)
    arguments: dict[str, Any] = {"path": source, "name": name}
    if path.is_file():
        arguments = {"path": _LOCAL_BUILDERS[path.suffix], "data_files": str(path)}
    elif path.is_dir():
        arguments["path"] = str(path.resolve())
    try:
        if _is_saved(path):
            saved = datasets.load_from_disk(str(path))
            splits = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            return _sliced(splits, split, streaming)
        return datasets.load_dataset(**arguments, split=split, streaming=streaming)
    except Exception as error:  # datasets has no common base class for what goes wrong
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        if not path.exists() and (hub := _hub_error(error, source)) is not None:
            raise DataError(str(hub)) from hub
        cause: BaseException = error
        if isinstance(error, datasets.exceptions.DatasetGenerationError):
            cause = error.__cause__ or error
        raise DataError(f"dataset {source}: {reason(cause)}") from error


def _stdlib(split: str, streaming: bool) -> Any:
    """A split, or a slice of one, of the standard library's sources; each file is a text."""
    import datasets

    splits = {}
    for name in ("train", "validation"):
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in stdlib_files(name)]
        if not texts:
            raise DataError(
                f"dataset {PYTHON_STDLIB}: this Python installation ships no library sources"
            )
        splits[name] = datasets.Dataset.from_dict({"text": texts})
    try:
        return _sliced(splits, split, streaming)
    except (ValueError, AssertionError, IndexError) as error:
        raise DataError(
            f"dataset {PYTHON_STDLIB}: no split {split!r}; use train or validation, or a slice of "
            "one, train[:90%]"
        ) from error


def _sliced(splits: dict[str, Any], split: str, streaming: bool) -> Any:
    import datasets

    lengths = {key: len(part) for key, part in splits.items()}
    parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    chosen = [splits[p.splitname].select(range(p.from_, p.to)) for p in parts]
    dataset = datasets.concatenate_datasets(chosen)
    if streaming:
        return dataset.to_iterable_dataset()
    return dataset


def _hub_error(error: Exception, source: str) -> HubError | None:
    import datasets
    import huggingface_hub

    what = f"dataset {source}"
    if isinstance(error, datasets.exceptions.DatasetNotFoundError):
        # datasets drops the Hub's answer, which tells a wrong name from a missing token; ask again.
        try:
            huggingface_hub.HfApi().dataset_info(source)
        except Exception as answer:
            return explain(answer, what) or HubError(
                f"{what}: neither a local path nor on the Hub; check the spelling"
            )
    return explain(error, what)


@contextmanager
def _progress(verbose: bool) -> Iterator[None]:
    """Silence the bars and the log lines of `datasets` inside the block, unless `verbose`."""
    import datasets

    bars = not datasets.are_progress_bars_disabled()
    level = datasets.logging.get_verbosity()
    if not verbose:
        datasets.disable_progress_bars()
        # A broken file is logged as an error, then raised.
        datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()
