"""What stands beside an adapter, whoever put it there: it never costs a save,
and nothing is read through a link."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import build_base, build_routed, logits
from peft import LoraConfig, PeftConfig, PeftModel
from safetensors.torch import load_file, save_file

import hf_depthroute.adapter.loading
from hf_depthroute import cli
from hf_depthroute.adapter.files import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterMismatchError,
    read_tensors,
)
from hf_depthroute.adapter.loading import match_tensors
from hf_depthroute.adapter.source import settle
from hf_depthroute.adapter.tensor_rules import RULES
from hf_depthroute.card import make_card, push_folder, write_card
from hf_depthroute.card.readme import parse_readme
from hf_depthroute.config.adapter import DepthRouteConfig
from hf_depthroute.files.hub import without_tokens
from hf_depthroute.files.strict_yaml import YamlError, read_mapping
from hf_depthroute.files.untrusted import RefusedFileError, nests_deeper, place_of, read_file
from hf_depthroute.parts.memory import NgramMemory

SECRET = "the secret of another folder"
FIELDS = (
    "arguments",
    "calibrated_full_ratio",
    "command",
    "dataset",
    "evaluation",
    "examples",
    "hyperparameters",
)
FIELDS += (
    "log_history",
    "seconds",
    "thresholds",
    "trainable_parameters",
    "versions",
    "weights_hash",
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400)
)
KEYS = st.sampled_from(
    ["1", "3", "step", "loss", "rule", "budget", "length", "dataset", "full_ratio", ""]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
RECORDS = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5) | JSON
ROW = {"budget": 1.0, "rule": "dense", "loss": 2.0, "full_ratio": 1.0}
METADATA = (
    "self: 1", "eval_results: [1]", "ignore_metadata_errors: 1", "model-index: 3",
    "model-index: [{name: [], results: 1}]", "tags: {a: 1}", "? [1, 2]\n: 3", "a: &a [*a]",
    "license: !!python/object:os.system x", "- a", "x: \"\\ud800\"", "base_model: [1]", "1: 2",
    "date: 2024-01-01", "model_name: 3", "tags: [[1]]", "[" * 5000, "x: " + "\n" * 5000,
)  # fmt: skip


def nested_merges(depth: int) -> str:
    """YAML of some bytes per level that a parser which follows merge keys takes
    `2 ** depth` steps for."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


BEGIN = "<!-- hf_depthroute: generated, ab -->\n"
READMES = st.binary(max_size=60) | st.tuples(
    st.sampled_from(["---\n", "\ufeff---\n", "---\r\n", "\n---\n", ""]),
    st.sampled_from(METADATA) | st.text(max_size=30),
    st.sampled_from(["\n---\n", "\n---", "\n--- \n", "\n"]),
    st.sampled_from(
        [
            "text",
            "<!-- hf_depthroute: generated, ab -->\n",
            "<!-- hf_depthroute: generated, ab -->\nx\n<!-- ",
        ]
    ),
    st.sampled_from(["", "<!-- hf_depthroute: end of the generated part -->", "{{ 7*7 }}"]),
).map(lambda parts: "".join(parts).encode(errors="surrogatepass"))


@pytest.fixture(scope="module")
def model() -> PeftModel:
    return build_routed("llama", gate_hidden=4, branch_rank=2)


@pytest.fixture
def adapter(model: PeftModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def saved_beside(model: PeftModel, name: str, content: bytes) -> list[str]:
    """The warnings of a save into a folder that holds this file;
    the adapter has to be there, whole."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / name).write_bytes(content)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model.save_pretrained(folder)
        config = json.loads((folder / CONFIG_NAME).read_text())
        assert (
            hf_depthroute.adapter.files.tensors_hash(load_file(folder / WEIGHTS_NAME))
            == config["weights_hash"]
        )
        return [str(warning.message) for warning in said if "model card" in str(warning.message)]


# A file beside the adapter never refuses a save ---------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(record=RECORDS)
@example(record={"arguments": 1})
@example(record={"versions": "1", "log_history": 3})
@example(record={"evaluation": [ROW, {}]})
@example(record={"evaluation": [ROW | {"loss": 10**400}]})
@example(record={"log_history": [{"loss": 10**400, "step": "x"}]})
@example(record={"thresholds": {"x": 1}, "calibrated_full_ratio": {"1": "x"}})
@example(record={"dataset": "x" * 5000})
def test_any_record_of_training_lets_a_save_happen(model: PeftModel, record: Any) -> None:
    said = saved_beside(model, "training.json", json.dumps(record).encode())
    assert len(said) <= 1 and all("training.json" in line for line in said)


@settings(max_examples=40, deadline=None)
@given(record=RECORDS.filter(lambda record: isinstance(record, dict)))
def test_any_record_of_training_makes_a_card(model: PeftModel, record: dict[str, Any]) -> None:
    """Not the save alone is kept from harm: what is understood is shown."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(place)
        assert "## What is routed" in make_card(place, training=record).text


@settings(max_examples=60, deadline=None)
@given(content=READMES)
@example(content=b"---\n" + b"\n" * 200_000)
@example(content=b"<!-- hf_depthroute: generated, a -->\n" * 20_000)
@example(content=b"---\na: 1\n" + b"# \n" * 30_000 + b"\n---\nwords")
@example(content=b"---\n" + nested_merges(24).encode() + b"---\nwords")
def test_any_readme_lets_a_save_happen(model: PeftModel, content: bytes) -> None:
    began = time.process_time()
    said = saved_beside(model, "README.md", content)
    assert len(said) <= 1 and all("README.md" in line for line in said)
    assert time.process_time() - began < 5.0


DAMAGED = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"a": ' * 50_000,
    b"null",
    b"3",
    b'"x"',
    b"[1]",
    b"\x00" * 99,
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: repr(content[:8]))
def test_a_damaged_record_is_named_and_the_card_is_written(
    model: PeftModel, content: bytes
) -> None:
    (said,) = saved_beside(model, "training.json", content)
    assert said.startswith("left out of the model card: ") and "training.json" in said


@pytest.mark.parametrize("name", ["README.md", "training.json"])
@pytest.mark.parametrize(
    "kind", ["folder", "pipe", "link to nothing", "link to itself", "too large"]
)
def test_what_is_no_file_beside_the_adapter_costs_a_warning(
    model: PeftModel, tmp_path: Path, name: str, kind: str
) -> None:
    makers: dict[str, Callable[[Path], Any]] = {
        "folder": Path.mkdir,
        "pipe": os.mkfifo,
        "link to nothing": lambda path: path.symlink_to("nothing"),
        "link to itself": lambda path: path.symlink_to(name),
        "too large": lambda path: path.write_bytes(b" " * (20 << 20)),
    }
    makers[kind](tmp_path / name)
    with pytest.warns(UserWarning, match=f"model card.*{name}|{name}.*model card"):
        model.save_pretrained(tmp_path)
    PeftModel.from_pretrained(build_base("llama"), tmp_path)
    assert os.path.lexists(tmp_path / name)


def test_a_card_that_cannot_be_made_costs_a_warning(
    model: PeftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no card today")

    monkeypatch.setattr("hf_depthroute.card.peft_cards.write_card", broken)
    with pytest.warns(
        UserWarning,
        match=rf"{tmp_path / 'README.md'}: the model card was not written: no card today",
    ):
        model.save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]


def test_metadata_and_text_of_a_strangers_readme_are_kept() -> None:
    card = parse_readme(b"\xef\xbb\xbf---\r\nlicense: mit\r\nmine: [1]\r\n---\r\n# Title\r\n")
    assert card.data.to_dict() == {"license": "mit", "mine": [1]} and card.text == "# Title\n"
    assert parse_readme(b"---\n[1\n---\nwords").text == "words"
    assert parse_readme(b"words\n---\nmore").text == "words\n---\nmore"


# Links --------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_text(json.dumps({"dataset": SECRET, "versions": {SECRET: SECRET}}))
    return path


def linked(adapter: Path, name: str, target: Path) -> None:
    (adapter / name).unlink(missing_ok=True)
    (adapter / name).symlink_to(target)


@pytest.mark.parametrize("name", ["README.md", "training.json"])
def test_a_card_shows_nothing_of_a_file_outside_the_folder(
    adapter: Path, secret: Path, name: str, model: PeftModel, capsys: pytest.CaptureFixture[str]
) -> None:
    linked(adapter, name, secret)
    with pytest.raises(AdapterMismatchError, match=f"{name}: is a link out of its folder"):
        write_card(adapter)
    with pytest.raises(SystemExit) as ended:
        cli.main(["card", str(adapter)])
    assert ended.value.code == 4 and "is a link out of its folder" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="is a link out of its folder"):
        model.save_pretrained(adapter)
    assert not [
        p for p in adapter.iterdir() if not p.is_symlink() and SECRET.encode() in p.read_bytes()
    ]
    assert (adapter / name).is_symlink() and SECRET in secret.read_text()


@pytest.mark.parametrize("name", ["README.md", "training.json", CONFIG_NAME, WEIGHTS_NAME])
def test_a_push_takes_no_file_from_outside_the_folder(
    adapter: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda *args, **kwargs: pytest.fail("was asked")
    )
    (adapter / "training.json").write_text("{}")
    (adapter / name).rename(tmp_path / name)
    linked(adapter, name, tmp_path / name)
    with pytest.raises(
        AdapterMismatchError, match=f"not sent: .*{name}: is a link out of its folder"
    ):
        push_folder(adapter, "me/router")


def test_links_that_stay_in_the_folder_and_those_of_the_hubs_cache_are_followed(
    adapter: Path, tmp_path: Path
) -> None:
    (adapter / "README.md").write_text("My words.\n")
    repository = tmp_path / "cache" / "models--me--router"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in adapter.iterdir():
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash-{file.name}")
    assert "My words." in write_card(snapshot).read_text()
    # The cache's file is not written into.
    assert (blobs / "hash-README.md").read_text() == "My words.\n"
    PeftModel.from_pretrained(build_base("llama"), snapshot)
    (snapshot / "inner").mkdir()
    (snapshot / "inner" / "README.md").write_text("inner")
    (snapshot / "link").symlink_to("inner/README.md")
    assert place_of(snapshot / "link", snapshot) == (snapshot / "inner" / "README.md").resolve()


def test_blobs_that_are_a_link_themselves_are_no_cache(tmp_path: Path, secret: Path) -> None:
    snapshot = tmp_path / "x" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "x" / "blobs").symlink_to(secret.parent)
    (snapshot / "README.md").symlink_to("../../blobs/secret")
    with pytest.raises(RefusedFileError, match="link out of its folder"):
        read_file(snapshot / "README.md", 1000, snapshot)


# Tokens -------------------------------------------------------------------------------------------

TOKENS = (
    "hf_" + "a" * 34,
    "api_org_" + "A1" * 17,
    "hf_oauth_eyJhbGciOiJFZERTQSJ9.eyJzY29wZSI6WyJ.x-y_z0123456789",
    "hf_jwt_eyJhbGciOiJFZERTQSJ9.eyJzY29wZSI6WyJ.x-y_z0123456789",
    "hf_oauth_" + "B2" * 20,
)


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize(
    "around", ["{}", "https://me:{}@host/x", "Authorization: Bearer {}\n", "token='{}',", "x_{}"]
)
def test_every_form_of_token_is_masked(token: str, around: str) -> None:
    shown = without_tokens(around.format(token))
    assert (
        not [part for part in token.split("_")[-1].split(".") if part in shown] and "***" in shown
    )


def test_what_is_no_token_is_shown() -> None:
    text = (
        "hf_depthroute hf_oauth_short api_org_key https://huggingface.co/hf-internal-testing/tiny"
    )
    assert without_tokens(text) == text


# Bounds -------------------------------------------------------------------------------------------


def late(config: dict[str, Any], filler: str) -> str:
    """A config that says after `filler` whose it is."""
    rest = json.dumps({name: value for name, value in config.items() if name != "peft_type"})
    return f'{{"x": {filler}, {rest[1:-1]}, "peft_type": "DEPTH_ROUTE"}}'


LARGE = {
    "many lists": lambda c: late(c, "[" + "[1]," * 3_000_000 + "1]"),
    "deep after 1 MiB": lambda c: late(
        c, '"' + "a" * (1 << 20) + '", "y": ' + "[" * 100_000 + "]" * 100_000
    ),
    "deep, spelt with an escape": lambda c: late(
        c, '"' + "a" * (1 << 20) + '", "y": ' + "[" * 100_000 + "]" * 100_000
    ).replace('"peft_type"', '"peft_typ\\u0065"'),
    "deep, without a method": lambda c: "[" * 100_000 + "]" * 100_000,
    "deep behind brackets in a string": lambda c: late(
        c, '"' + "]" * 5000 + '", "y": ' + "[" * 5000 + "]" * 5000
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_config_out_of_bounds_reaches_no_parser(
    adapter: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = adapter / CONFIG_NAME
    path.write_text(LARGE[name](json.loads(path.read_text())))
    parsed: list[int] = []
    monkeypatch.setattr(
        json.JSONDecoder, "raw_decode", lambda self, text, *a, **k: parsed.append(len(text))
    )
    began = time.process_time()
    for read in (PeftConfig.from_pretrained, PeftConfig._get_peft_type):
        with pytest.raises(
            AdapterMismatchError, match=r"larger than 1,048,576 bytes|nested more than 8 deep"
        ):
            read(str(adapter))
    assert parsed == [] and time.process_time() - began < 2.0


HIDDEN = {
    "an escape in the key": '"peft_type": "LORA", "peft\\u005ftype": "DEPTH_ROUTE"',
    "an escape in the value": '"peft_type": "LORA", "peft_type": "DEPTH\\u005FROUTE"',
    "a long gap": '"peft_type": "LORA", "peft_type"' + " " * 200 + ': "DEPTH_ROUTE"',
    "a long gap behind a megabyte": '"peft_type": "LORA", "x": "' + "a" * (1 << 20) + '", "peft_type"'
    + " " * 200 + ': "DEPTH_ROUTE"',
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
def test_a_method_that_is_hidden_behind_another_is_found(adapter: Path, name: str) -> None:
    path = adapter / CONFIG_NAME
    path.write_text(path.read_text().replace('"peft_type": "DEPTH_ROUTE"', HIDDEN[name]))
    with pytest.raises(
        AdapterMismatchError, match=r"larger than 1,048,576 bytes|'peft_type' is there twice"
    ):
        PeftConfig.from_pretrained(str(adapter))


@pytest.mark.parametrize("link", ["stage", "config", "place"])
def test_a_save_in_another_folder_is_not_finished_through_a_link(
    adapter: Path, tmp_path: Path, link: str
) -> None:
    victim, hostile = Path(shutil.copytree(adapter, tmp_path / "victim")), tmp_path / "hostile"
    content = {file.name: file.read_bytes() for file in victim.iterdir()}
    if link == "place":  # a config of the stranger's for the victim's weights
        shutil.copytree(adapter, hostile / ".saving-x" / "named")
        (hostile / "named").symlink_to(victim)
        config = json.loads(content[CONFIG_NAME]) | {"budget": 0.125}
        (hostile / ".saving-x" / "named" / CONFIG_NAME).write_text(json.dumps(config))
    else:  # the victim's config, for the same weights
        shutil.copytree(adapter, hostile)
        (hostile / CONFIG_NAME).unlink()
        if link == "stage":
            (hostile / ".saving-x").symlink_to(victim)
        else:
            (hostile / ".saving-x").mkdir()
            (hostile / ".saving-x" / CONFIG_NAME).symlink_to(victim / CONFIG_NAME)
    settle(hostile)
    assert {file.name: file.read_bytes() for file in victim.iterdir()} == content
    assert not (hostile / CONFIG_NAME).exists()


def test_a_link_to_itself_costs_no_load(adapter: Path) -> None:
    (adapter / ".saving-x" / "named").mkdir(parents=True)
    (adapter / ".saving-x" / "named" / CONFIG_NAME).write_bytes(
        (adapter / CONFIG_NAME).read_bytes()
    )
    (adapter / "named").symlink_to("named")
    settle(adapter)


def test_large_configs_of_other_methods_are_pefts(tmp_path: Path) -> None:
    LoraConfig(
        target_modules=[f"model.layers.{number}.a_long_name" for number in range(40_000)]
    ).save_pretrained(tmp_path)
    assert (tmp_path / CONFIG_NAME).stat().st_size > 1 << 20
    assert len(PeftConfig.from_pretrained(tmp_path).target_modules) == 40_000


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.text(alphabet='[]{}"\\x', max_size=6), lambda inner: st.lists(inner, max_size=2)
    )
)
def test_nesting_is_counted_as_a_parser_would(value: Any) -> None:
    def depth(part: Any) -> int:
        return 1 + max(map(depth, part), default=0) if isinstance(part, list) else 0

    text = json.dumps(value)
    assert not nests_deeper(text, depth(value))
    assert depth(value) == 0 or nests_deeper(text, depth(value) - 1)


@pytest.mark.parametrize(
    "text", ['"' + '\\"' * 300_000, '"' * 300_001, "\\" * 300_000, '"' + "a\\" * 300_000]
)
def test_nesting_is_counted_in_linear_time(text: str) -> None:
    began = time.process_time()
    assert not nests_deeper(text, 8)
    assert time.process_time() - began < 2.0


YAML = {
    "a key twice under a merge": "<<: {budget: 0.1, budget: 0.9}\nlayers: all\n",
    "a key twice in merged mappings": "<<: [{budget: 0.1}, {budget: 0.9}]\n",
    "a merge and the key": "<<: {budget: 0.1}\nbudget: 0.9\n",
    "a merge further down": "adapter:\n  <<: {budget: 0.1, budget: 0.9}\n",
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_cannot_repeat_a_key_by_merging(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text(YAML[name])
    with pytest.raises(
        YamlError, match=r"merge keys \(<<\) are not supported; write the values out"
    ):
        read_mapping(tmp_path / "config.yaml")


def test_yaml_nests_as_deep_as_a_config_may(tmp_path: Path) -> None:
    """At most; Python's recursion limit takes seconds to be reached under a tracer."""
    file = tmp_path / "config.yaml"
    file.write_text("x: " + "[" * 30 + "1" + "]" * 30 + "\n")
    assert list(read_mapping(file)) == ["x"]
    for text in ("x: " + "[" * 31 + "1" + "]" * 31 + "\n", "[" * 5000):
        file.write_text(text)
        with pytest.raises(YamlError, match="nests more than 32 deep"):
            read_mapping(file)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0256", "0256"),
        ("-010", "-010"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("007", "007"),
        ("0", 0),
        ("256", 256),
        ("1_000", 1000),
        ("0x10", 16),
        ("0b11", 3),
        ("0.25", 0.25),
        ("-0.5e-3", -0.5e-3),
    ],
)
def test_yaml_numbers_are_what_is_written_and_never_of_base_8_or_60(
    tmp_path: Path, written: str, read: object
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"x: {written}\n")
    found = read_mapping(file)["x"]
    assert (type(found), found) == (type(read), read)


def test_yaml_without_an_end_is_refused() -> None:
    with pytest.raises(YamlError, match="larger than 1 MiB"):
        read_mapping(Path("/dev/zero"))


def test_every_file_of_yaml_is_read_by_the_strict_reader() -> None:
    package = Path(hf_depthroute.__file__).parent
    readers = re.compile(r"yaml\.(?:safe_|full_|unsafe_)?load|ModelCard\.load|metadata_load")
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if readers.search(path.read_text())
    }
    assert found == {"files/strict_yaml.py"}


# Weights ------------------------------------------------------------------------------------------


def with_offsets(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Change the entries of a safetensors header, in the order of their bytes."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    change(
        sorted(
            (e for n, e in header.items() if n != "__metadata__"), key=lambda e: e["data_offsets"]
        )
    )
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def same_bytes(entries: list[Any]) -> None:
    alike = next(
        (a, b) for a in entries for b in entries if a is not b and a["shape"] == b["shape"]
    )
    alike[1]["data_offsets"] = alike[0]["data_offsets"]


def one_further(entries: list[Any]) -> None:
    entries[1]["data_offsets"] = [at + 4 for at in entries[1]["data_offsets"]]


@pytest.mark.parametrize("change", [same_bytes, one_further])
def test_tensors_that_share_bytes_are_refused(
    adapter: Path, change: Callable[[list[Any]], None]
) -> None:
    with_offsets(adapter / WEIGHTS_NAME, change)
    base = build_base("llama")
    with pytest.raises(AdapterMismatchError, match="corrupt"):
        PeftModel.from_pretrained(base, adapter)
    assert not hasattr(base, "peft_config")


Change = Callable[[dict[str, torch.Tensor]], None]


def put(ending: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith(ending))
        tensors[name] = value(tensors[name])

    return change


RANGES: dict[str, tuple[Change, str]] = {
    "a count of -1": (put("updates", lambda t: t.fill_(-1)), "is a count"),
    "a count of -2": (put("updates", lambda t: t.fill_(-2)), "is a count"),
    "the least count": (put("updates", lambda t: t.fill_(-(2**63))), "is a count"),
    "a count that overflows": (put("updates", lambda t: t.fill_(2**63 - 1)), "is a count"),
    "counts of floats": (put("updates", lambda t: t.float() * torch.nan), "is a count"),
    "a table that falls": (put("quantiles.values", lambda t: t.flip(0)), "quantiles ascend"),
    "a table with a dip": (
        put("quantiles.values", lambda t: t.index_fill(0, torch.tensor(100), -9)),
        "ascend",
    ),
    "a table whose differences are infinite": (
        put("quantiles.values", lambda t: t.sign() * 3e38),
        "beyond 1e",
    ),
    "a table with NaN": (put("quantiles.values", lambda t: t * torch.nan), "not finite"),
    "a controller out of reach": (put("controller.threshold", lambda t: t + 3e38), "beyond 1e"),
    "a controller of NaN": (put("controller.threshold", lambda t: t * torch.nan), "not finite"),
    "a memory with infinity": (put("memory.table", lambda t: t + torch.inf), "not finite"),
}


@pytest.fixture(scope="module")
def with_every_buffer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buffers")
    memory = {"branch": "memory", "memory_slots": 8192, "memory_width": 4}
    build_routed("llama", selection="controller", **memory).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", RANGES)
def test_every_number_of_an_adapter_has_a_range(
    name: str, with_every_buffer: Path, tmp_path: Path
) -> None:
    folder, (change, said) = (
        Path(shutil.copytree(with_every_buffer, tmp_path / "adapter")),
        RANGES[name],
    )
    tensors = load_file(folder / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_NAME)
    config = json.loads((folder / CONFIG_NAME).read_text()) | {"weights_hash": None}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    base = build_base("llama")
    with pytest.raises(AdapterMismatchError, match=said):
        PeftModel.from_pretrained(base, folder)
    with pytest.raises(AdapterMismatchError, match=said):
        base.load_adapter(str(folder))
    assert not hasattr(base, "peft_config")


def test_every_buffer_of_an_adapter_has_a_rule() -> None:
    """One that is added needs a range as well; those of frozen gates are weights."""
    memory = {"branch": "memory", "memory_slots": 8192, "memory_width": 4}
    model = build_routed("llama", selection="controller", **memory)
    buffers = [name for name, _ in model.named_buffers() if "depth_route" in name]
    assert buffers and all(name.replace(".default", "").endswith(tuple(RULES)) for name in buffers)


def test_weights_that_are_finite_in_the_file_alone_are_refused(adapter: Path) -> None:
    tensors = load_file(adapter / WEIGHTS_NAME)
    put("gate.hidden.weight", lambda t: t + 1e38)(tensors)
    model = PeftModel.from_pretrained(build_base("llama"), adapter).half()
    with pytest.raises(AdapterMismatchError, match="not finite"):
        match_tensors(model, model.peft_config["default"], "default", tensors)


def many_tensors(folder: Path, layer: int, count: int) -> None:
    """Weights of `count` empty tensors whose names are those of a gate."""
    start = f"base_model.model.model.layers.{layer}.routing.depth_route_gate.x"
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{start}{number}.weight": empty for number in range(count)}).encode()
    (folder / WEIGHTS_NAME).write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize("count", [300, 20_000, 40_000])
def test_a_file_of_many_tensors_is_refused_by_its_header(adapter: Path, count: int) -> None:
    many_tensors(adapter, 1, count)
    began = time.process_time()
    with pytest.raises(
        AdapterMismatchError, match=r"more than 256 tensors of layer 1|its header says that it has"
    ):
        PeftModel.from_pretrained(build_base("llama"), adapter)
    assert time.process_time() - began < 3.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (b"\xff" * 64, "bytes; download or copy it again"),
    ],
)
def test_what_is_no_weights_file_says_what_to_do(adapter: Path, content: bytes, said: str) -> None:
    (adapter / WEIGHTS_NAME).write_bytes(content)
    with pytest.raises(AdapterMismatchError, match=said):
        PeftModel.from_pretrained(build_base("llama"), adapter)


@pytest.mark.parametrize("missing", ["table", "file", "layers"])
@pytest.mark.parametrize("way", ["PEFT", "transformers", "a given config"])
def test_no_room_is_made_for_a_table_that_its_file_lacks(
    adapter: Path, missing: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "branch": "memory",
        "memory_slots": 1 << 22,
        "memory_width": 32,
        "memory_heads": 1,
        "ngram_order": 2,
    }
    config = json.loads((adapter / CONFIG_NAME).read_text()) | {"weights_hash": None, **sizes}
    config |= {"layers": "last:3"} if missing == "layers" else {}
    (adapter / CONFIG_NAME).write_text(json.dumps(config))
    if missing == "file":
        (adapter / WEIGHTS_NAME).unlink()
    monkeypatch.setattr(
        NgramMemory, "__init__", lambda *args: pytest.fail("a table of 512 MiB was made")
    )
    base = build_base("llama")
    with pytest.raises(
        AdapterMismatchError, match=r"table of layer 1 is missing|is missing; copy|list its layers"
    ):
        if way == "transformers":
            base.load_adapter(str(adapter))
        elif way == "PEFT":
            PeftModel.from_pretrained(base, adapter)
        else:
            PeftModel.from_pretrained(base, adapter, config=DepthRouteConfig(**config))
    assert not hasattr(base, "peft_config") and not any(
        "routing" in name for name, _ in base.named_modules()
    )


@pytest.fixture
def swapped(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[Path], None]], None]]:
    """`swapped(change)` changes the weights right after they have been checked."""

    def arm(change: Callable[[Path], None]) -> None:
        real = hf_depthroute.adapter.loading.check_folder

        def checked(folder: Path, config: Any) -> None:
            real(folder, config)
            change(folder)

        monkeypatch.setattr(hf_depthroute.adapter.loading, "check_folder", checked)

    yield arm


def other_weights(folder: Path) -> None:
    tensors = {name: value + 1 for name, value in load_file(folder / WEIGHTS_NAME).items()}
    save_file(tensors, folder / WEIGHTS_NAME)


def a_pickle(folder: Path) -> None:
    if (folder / WEIGHTS_NAME).exists():
        torch.save(load_file(folder / WEIGHTS_NAME), folder / "adapter_model.bin")
        (folder / WEIGHTS_NAME).unlink()


@pytest.mark.parametrize(
    ("change", "said"), [(other_weights, "not those that|another save"), (a_pickle, "pickle")]
)
def test_weights_that_are_exchanged_after_the_check_are_checked_again(
    adapter: Path, swapped: Any, change: Callable[[Path], None], said: str
) -> None:
    swapped(change)
    base = build_base("llama")
    with pytest.raises(AdapterMismatchError, match=said):
        PeftModel.from_pretrained(base, adapter)
    assert not hasattr(base, "peft_config")


def test_transformers_loads_the_bytes_that_were_checked(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read the file again."""
    expected = logits(PeftModel.from_pretrained(build_base("llama"), adapter).eval())
    real = hf_depthroute.adapter.loading.match_tensors

    def checked(*args: Any) -> Any:
        found = real(*args)
        other_weights(adapter)
        return found

    monkeypatch.setattr(hf_depthroute.adapter.loading, "match_tensors", checked)
    model = build_base("llama")
    model.load_adapter(str(adapter))
    assert torch.equal(logits(model.eval()), expected)


def test_writing_into_a_file_that_was_read_changes_nothing(adapter: Path) -> None:
    path = adapter / WEIGHTS_NAME
    tensors = read_tensors(path, json.loads((adapter / CONFIG_NAME).read_text()))
    before = {name: value.clone() for name, value in tensors.items()}
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x00" * (size // 2))
    assert all(torch.equal(value, before[name]) for name, value in tensors.items())
