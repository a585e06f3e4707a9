"""Text in, packed blocks out; what cannot be used is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from embedded_base.pretrain import fingerprint
from text_models import word_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_depthroute.data.text import PYTHON_STDLIB, DataError, load_text, pack, stdlib_files

WORDS = "the cat sat on the mat and the dog ran to the cat"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "user" / "text.txt"
    path.parent.mkdir()
    path.write_text("\n".join([WORDS] * 20))
    return path


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def only_line(error: pytest.ExceptionInfo[DataError]) -> str:
    (line,) = str(error.value).splitlines()
    return line


def test_every_line_of_a_text_file_is_a_text(text_file: Path) -> None:
    assert load_text(str(text_file))["text"][:] == [WORDS] * 20


def test_a_slice_of_a_split_is_loaded(text_file: Path) -> None:
    assert len(load_text(str(text_file), split="train[:25%]")) == 5


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_every_file_type_gives_the_same_texts(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    table = datasets.Dataset.from_dict({"body": ["a b", "c d"], "id": [1, 2]})
    {"csv": table.to_csv, "parquet": table.to_parquet}.get(suffix, table.to_json)(str(path))
    loaded = load_text(str(path), column="body")
    assert loaded.column_names == ["text"]
    assert loaded["text"][:] == ["a b", "c d"]


def test_what_save_to_disk_wrote_is_loaded_with_its_splits(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"body": [f"text {i}" for i in range(10)]})
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(
        tmp_path / "two"
    )
    for streaming in (False, True):

        def texts(folder: str, split: str, streaming: bool = streaming) -> list[str]:
            rows = load_text(
                str(tmp_path / folder), split=split, column="body", streaming=streaming
            )
            return [row["text"] for row in rows]

        assert texts("one", "train[80%:]") == ["text 8", "text 9"]
        assert len(texts("two", "train")) == 10 and texts("two", "test") == ["text 0", "text 1"]
        assert len(texts("two", "train[:3]+test")) == 5
    for folder in ("one", "two"):
        with pytest.raises(DataError) as caught:
            load_text(str(tmp_path / folder), split="validation")
        assert "validation" in only_line(caught) and "train" in only_line(caught)


def test_nothing_is_written_next_to_the_file(text_file: Path, own_cache: Path) -> None:
    pack(load_text(str(text_file)), word_tokenizer(), 8)
    assert list(text_file.parent.iterdir()) == [text_file]
    assert own_cache.exists()


def test_nothing_is_printed(text_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pack(load_text(str(text_file)), word_tokenizer(), 8)
    assert capfd.readouterr() == ("", "")


def test_progress_bars_are_as_before_afterwards(text_file: Path) -> None:
    assert not datasets.are_progress_bars_disabled()
    load_text(str(text_file))
    assert not datasets.are_progress_bars_disabled()


def test_stdlib_splits_do_not_overlap() -> None:
    train, validation = (set(stdlib_files(split)) for split in ("train", "validation"))
    assert not train & validation
    assert len(train) > 10 * len(validation) > 0


def test_stdlib_streams_the_same_texts() -> None:
    streamed = load_text(PYTHON_STDLIB, split="validation", streaming=True)
    stored = load_text(PYTHON_STDLIB, split="validation")
    assert fingerprint([row["text"] for row in streamed]) == fingerprint(stored["text"][:])


def test_slices_of_the_stdlib_are_its_files_in_order() -> None:
    whole, first, rest = (
        load_text(PYTHON_STDLIB, split=s)["text"][:]
        for s in ("train", "train[:90%]", "train[90%:]")
    )
    assert first + rest == whole and len(first) > 5 * len(rest) > 0


def test_fingerprint_depends_on_where_texts_end() -> None:
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])


def test_every_block_begins_as_a_prompt_does(text_file: Path) -> None:
    tokenizer = word_tokenizer()
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", begin)]
    )
    assert tokenizer(WORDS)["input_ids"][0] == begin
    rows = [row["input_ids"] for row in pack(load_text(str(text_file)), tokenizer, 8)]
    assert all(len(row) == 8 and row[0] == begin for row in rows)
    assert not any(row[1] == begin for row in rows)  # also where a text begins with the block
    words = tokenizer(WORDS, add_special_tokens=False)["input_ids"] * 20
    joined = [token for row in rows for token in row if token != begin]
    assert joined == words[: len(joined)] and len(words) - len(joined) < 8


def test_what_the_tokenizer_puts_around_a_text_is_neither_lost_nor_doubled(text_file: Path) -> None:
    for around, before in (("<bos> <unk> $A", [1, 3]), ("$A <eos>", []), ("<bos> $A <eos>", [1])):
        tokenizer = word_tokenizer()
        special = [("<bos>", 1), ("<eos>", 2), ("<unk>", 3)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=around, special_tokens=special
        )
        rows = [row["input_ids"] for row in pack(load_text(str(text_file)), tokenizer, 8)]
        assert all(row[: len(before)] == before for row in rows)
        joined = [token for row in rows for token in row if token not in before]
        stream = [token for token in tokenizer(WORDS)["input_ids"] * 20 if token not in before]
        assert joined == stream[: len(joined)] and len(stream) - len(joined) < 8
    with pytest.raises(DataError, match="at least 3 tokens"):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> <unk> $A", special_tokens=special
        )
        pack(load_text(str(text_file)), tokenizer, 2)


def test_blocks_are_the_token_stream_with_end_tokens(text_file: Path) -> None:
    tokenizer = word_tokenizer()
    packed = pack(load_text(str(text_file)), tokenizer, 8)
    stream = (tokenizer(WORDS)["input_ids"] + [tokenizer.eos_token_id]) * 20
    joined = [token for row in packed for token in row["input_ids"]]
    assert joined == stream[: len(stream) // 8 * 8]
    assert all(
        row["labels"] == row["input_ids"] and row["attention_mask"] == [1] * 8 for row in packed
    )


def test_streaming_gives_the_same_blocks(text_file: Path) -> None:
    tokenizer = word_tokenizer()
    stored = pack(load_text(str(text_file)), tokenizer, 8)
    streamed = pack(load_text(str(text_file), streaming=True), tokenizer, 8)
    assert list(streamed) == list(stored)


def test_a_stream_can_be_read_twice(text_file: Path) -> None:
    streamed = pack(load_text(str(text_file), streaming=True), word_tokenizer(), 8)
    assert list(streamed) == list(streamed)


def test_empty_and_missing_texts_are_left_out(tmp_path: Path) -> None:
    rows = [{"text": WORDS}, {"text": None}, {"text": ""}, {"text": WORDS}]
    tokenizer = word_tokenizer()
    with_gaps = pack(load_text(str(write_jsonl(tmp_path / "a.jsonl", rows))), tokenizer, 14)
    assert (
        with_gaps["input_ids"][:] == [tokenizer(WORDS)["input_ids"] + [tokenizer.eos_token_id]] * 2
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_text_shorter_than_a_block_is_refused(text_file: Path, streaming: bool) -> None:
    text = load_text(str(text_file), streaming=streaming)
    with pytest.raises(DataError, match="shorter than one block of 1000 tokens"):
        pack(text, word_tokenizer(), 1000)


def test_a_block_of_one_token_is_refused(text_file: Path) -> None:
    with pytest.raises(DataError, match="at least 2"):
        pack(load_text(str(text_file)), word_tokenizer(), 1)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_empty_file_is_refused(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    with pytest.raises(DataError, match="empty"):
        load_text(str(path), streaming=streaming)


def test_missing_file_folder_split_column_and_type_have_their_own_messages(
    text_file: Path, tmp_path: Path
) -> None:
    empty_folder = tmp_path / "nothing"
    empty_folder.mkdir()
    other = tmp_path / "text.doc"
    other.write_text("words")
    numbers = write_jsonl(tmp_path / "numbers.jsonl", [{"text": 1}])
    requests = {
        "no such file": {"source": str(tmp_path / "absent.txt")},
        "no such file or folder": {"source": "./absent"},
        "any data files": {"source": str(empty_folder)},
        "unknown file type; use one of .txt": {"source": str(other)},
        "split": {"source": str(text_file), "split": "test"},
        "no column 'body'; it has text": {"source": str(text_file), "column": "body"},
        "holds int64, not text": {"source": str(numbers)},
        "no split 'test'; use train or validation": {"source": PYTHON_STDLIB, "split": "test"},
        "no split 'train[900:]'; use train": {"source": PYTHON_STDLIB, "split": "train[900:]"},
    }
    messages = set()
    for expected, request in requests.items():
        with pytest.raises(DataError, match="dataset") as error:
            load_text(**request)
        assert expected in only_line(error)
        messages.add(str(error.value))
    assert len(messages) == len(requests)


@pytest.mark.parametrize(
    "name, content", [("a.jsonl", b'{"text": broken\n'), ("a.parquet", b"not parquet")]
)
def test_a_broken_file_is_refused_without_log_lines(
    name: str, content: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as error:
        load_text(str(tmp_path / name))
    assert "An error occurred" not in only_line(error)
    assert capfd.readouterr() == ("", "")


def test_a_stream_without_the_column_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    with pytest.raises(DataError, match="no column 'body'"):
        load_text(str(path), column="body", streaming=True)


def test_a_name_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    """A configuration is a Hub dataset's; a file or a saved folder has none."""
    file = tmp_path / "text.txt"
    file.write_text("one\ntwo\n")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    for source in (file, tmp_path / "saved", PYTHON_STDLIB):
        with pytest.raises(DataError, match="has no configuration 'sample'"):
            load_text(str(source), name="sample")


def test_a_hub_dataset_is_refused_when_offline() -> None:
    with pytest.raises(DataError, match="HF_HUB_OFFLINE is set") as error:
        load_text("someone/dataset")
    assert "someone/dataset" in only_line(error)
