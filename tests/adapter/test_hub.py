"""From a trained model to another process through the Hub's own protocol,
and what is said where that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
from card_rules import card_fault
from hub_repository import Repository
from hub_server import TOKEN, HubServer
from huggingface_hub import ModelCard
from places import HELPERS
from text_models import save_base

from hf_depthroute.cli import errors

CLIENT = HELPERS / "hub_client.py"


class Story(NamedTuple):
    """What the processes wrote, what they printed, and the Hub after them."""

    push: dict[str, Any]
    load: dict[str, Any]
    without: dict[str, Any]
    printed: str
    hub: HubServer


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Train and push; load in another process with an empty cache;
    once more after the Hub has gone."""
    folder = tmp_path_factory.mktemp("hub")
    base = save_base(folder / "base")
    files = {path.name: path.read_bytes() for path in base.iterdir()}
    printed = ""
    with HubServer() as hub:
        for name, gated in (("someone/tiny-llama", False), ("someone/gated", True)):
            hub.repositories[name] = Repository(gated=gated)
            hub.repositories[name].commit("main", files)
        for steps, home in ((["push"], "one"), (["load", "without"], "two")):
            ended = subprocess.run(
                [sys.executable, CLIENT, folder, *steps],
                env=hub.environment(folder / home),
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ended.returncode == 0, ended.stderr[-3000:]
            printed += ended.stdout + ended.stderr
    written = {
        step: json.loads((folder / f"{step}.json").read_text())
        for step in ("push", "load", "without")
    }
    return Story(**written, printed=printed, hub=hub)


def card_in(story: Story, repo: str, revision: str = "main") -> ModelCard:
    repository = story.hub.repositories[repo]
    return ModelCard(repository.commits[repository.find(revision)]["README.md"].decode())


def test_another_process_loads_the_same_model(story: Story) -> None:
    assert story.load["same"] == {"sha": True, "main": True, "branch": True}


def test_a_push_makes_a_private_repository_and_sends_weights_by_lfs(story: Story) -> None:
    repository = story.hub.repositories["me/router"]
    assert repository.private
    files = set(repository.commits[repository.find("main")])
    assert files == {
        ".gitattributes",
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    for request in ("POST /api/repos/create", "POST /me/router.git/info/lfs/objects/batch"):
        assert request in story.hub.requests
    assert any(request.startswith("PUT /lfs/") for request in story.hub.requests)


def test_scores_are_sent_in_the_card(story: Story) -> None:
    for name in ("me/measured", "me/remeasured"):
        repository = story.hub.repositories[name]
        held = repository.commits[repository.find("main")]
        assert b"model-index" in held["README.md"]
        assert not [file for file in held if file.startswith(".eval_results/")]


def test_what_did_not_change_makes_no_commit(story: Story) -> None:
    commits = story.push["commits"]
    assert commits["first"] != commits["second"] == commits["again"]
    assert commits["branch"] == commits["second"]  # a new branch, with what main has
    assert story.hub.repositories["me/router"].branches.keys() == {"main", "other"}


def test_the_card_is_there_and_valid(story: Story) -> None:
    card = card_in(story, "me/router", story.push["commits"]["first"])
    assert card_fault(card.content) is None
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("someone/tiny-llama", "adapter")
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation")
    assert {"base_model:adapter:someone/tiny-llama", "depth-routing"} <= set(data.tags)
    assert [result.metric_name for result in data.eval_results] == [
        "Loss, nats per token (budget 0.25)",
        "Loss, nats per token (budget 0.5)",
    ]
    assert 'adapter = "me/router"' in card.text
    assert "Last log entry, step 4" in card.text
    if story.load["errors"]["card"] is None:
        pytest.skip(
            "this version of huggingface_hub asks huggingface.co alone whether a card is valid"
        )
    assert "Validation error" not in story.load["errors"]["card"]
    assert story.load["errors"]["card"].startswith("ValueError")  # and the Hub would have said so


def test_a_later_push_keeps_its_tags_and_tells_the_new_budget(story: Story) -> None:
    card = card_in(story, "me/router")
    assert "my-tag" in card.data.tags
    assert "| budget | 0.25 of the calls in " in card.text
    assert card.text.count("# router") == 1


def test_trainer_and_command_push_the_same_kind_of_card(story: Story) -> None:
    by_trainer, by_command = card_in(story, "me/by-trainer"), card_in(story, "me/by-command")
    assert (by_trainer.data.license, by_command.data.license) == ("apache-2.0", "mit")
    assert by_trainer.data.datasets == ["someone/text"]
    for card in (by_trainer, by_command):
        assert "## What is routed" in card.text
        assert card_fault(card.content) is None
    code, out, err = story.push["command"]
    assert (code, err) == (0, "")
    assert "sent" in out and "me/by-command" in out


def test_other_methods_are_pushed_as_peft_pushes_them(story: Story) -> None:
    assert "hf_depthroute" not in card_in(story, "me/lora").content
    assert (
        "adapter_model.safetensors"
        in story.hub.repositories["me/lora"].commits[story.hub.repositories["me/lora"].find("main")]
    )


def test_commands_work_on_an_adapter_of_the_hub(story: Story) -> None:
    code, out, err = story.load["commands"]["generate"]
    assert code == 0, err
    assert out.startswith("the cat")
    code, out, err = story.load["commands"]["card"]
    assert code == 0, err
    assert "Loss, nats per token (budget 0.25)" not in out  # no results were given
    assert 'adapter = "me/router"' in out


@pytest.mark.parametrize(
    "command, message",
    [
        ("absent", "neither a local path nor on the Hub"),
        ("gated", "accept its terms"),
        ("not mine", "may write this repository"),
    ],
)
def test_a_refusal_is_one_line(command: str, message: str, story: Story) -> None:
    code, _, err = story.load["commands"][command]
    assert code == errors.HUB, err
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_repository_without_an_adapter_says_so(story: Story) -> None:
    code, _, err = story.load["commands"]["no adapter"]
    assert code == errors.ADAPTER
    assert len(err.splitlines()) == 1
    assert "adapter_config.json" in err


def test_the_libraries_name_what_is_missing(story: Story) -> None:
    said = story.load["errors"]
    for kind in ("repository", "revision", "file", "gated"):
        assert "Can't find 'adapter_config.json'" in said[kind] or "gated" in said[kind].lower(), (
            said[kind]
        )
    assert "403" in story.push["foreign"]


def test_python_says_what_the_command_line_says(story: Story) -> None:
    """In one line, whatever the Hub's client raised, for a push and for the lookup of a base."""
    said = story.load["errors"]
    assert story.push["foreign"].startswith(
        "HubError: repository someone/tiny-llama: the Hub refused the token (403)"
    )
    assert said["no token"].startswith(
        "HubError: repository me/router: the Hub takes nothing without a token"
    )
    assert said["no base"].startswith(
        "HubError: model me/absent: neither a local path nor on the Hub (404)"
    )
    for how, message in (
        ("dead", "the Hub cannot be reached"),
        ("offline", "HF_HUB_OFFLINE is set"),
    ):
        found = story.without[how]["python"]
        assert (
            found["push"].startswith("HubError: repository me/router: ")
            and message in found["push"]
        ), found
        assert (
            found["base"].startswith("HubError: model me/never-downloaded: ")
            and message in found["base"]
        ), found
        assert all(len(line.splitlines()) == 1 for line in found.values())


def test_offline_what_is_cached_works(story: Story) -> None:
    found = story.without["offline"]
    assert found["same"]
    code, out, err = found["cached"]
    assert code == 0, err
    assert out.startswith("the")


def test_a_dead_hub_leaves_the_base_as_it_was(story: Story) -> None:
    found = story.without["dead"]
    assert found["untouched"]
    assert found["load"].startswith(("ConnectError", "RemoteProtocolError")), found["load"]


@pytest.mark.parametrize(
    "how, command, message",
    [
        ("dead", "absent", "the Hub cannot be reached"),
        ("dead", "cached", "set HF_HUB_OFFLINE=1"),
        ("dead", "push", "the Hub cannot be reached"),
        ("offline", "absent", "HF_HUB_OFFLINE is set"),
        ("offline", "push", "HF_HUB_OFFLINE is set"),
    ],
)
def test_without_the_hub_a_command_ends_with_one_line(
    how: str, command: str, message: str, story: Story
) -> None:
    code, _, err = story.without[how][command]
    assert code == errors.HUB, err
    assert len(err.splitlines()) == 1
    assert message in err


def test_the_token_is_nowhere(story: Story) -> None:
    """Where the server repeats it too; an exception of the Hub's client says what
    the server said."""
    commands = [story.push["command"], story.load["commands"], story.without]
    written = json.dumps(commands) + story.printed
    commits = [
        files
        for repository in story.hub.repositories.values()
        for files in repository.commits.values()
    ]
    assert TOKEN not in written
    assert not any(TOKEN.encode() in content for files in commits for content in files.values())
