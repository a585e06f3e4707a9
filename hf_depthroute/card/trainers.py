"""`create_model_card` and `push_to_hub` of a Trainer, with this library's card."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class CardMixin:
    """A `transformers.Trainer` of a routed model whose `create_model_card` writes its card.

    `push_to_hub` of the Trainer calls it, and passes on what it does not know itself:
    `trainer.push_to_hub(results=["eval.json"], license="apache-2.0")`.
    """

    args: Any
    accelerator: Any
    model: Any
    is_world_process_zero: Any

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | Sequence[str] | None = None,
        model_name: str | None = None,
        dataset: str | Sequence[str] | None = None,
        results: Sequence[Any] = (),
        **ignored: Any,
    ) -> None:
        """Write `README.md` in `output_dir`.

        Args:
            language: The metadata's language.
            license: The metadata's licence; not guessed from the base's.
            tags: More tags.
            model_name: The title.
            dataset: Hub ids of the training data. Default: what the training dataset says.
            results: As for `hf_depthroute.card.make_card`; what was added with `add_results` is shown too.
            **ignored: Other arguments of `Trainer.create_model_card` and TRL's: the card has them from the run.

        Raises:
            ResultError: A result cannot be read, or was measured with other weights.
        """
        from .facts import holds_adapter
        from .page import make_card, put_card, routed_name, write_card
        from .record import remembered
        from .training import read_training

        if not self.is_world_process_zero():
            return
        model = self.accelerator.unwrap_model(self.model)
        name = routed_name(model)
        run = None if name is None else remembered(model, name)
        folder = Path(str(self.args.output_dir))
        arguments: dict[str, Any] = {
            "language": language,
            "license": license,
            "tags": _listed(tags),
            "model_name": model_name,
            "datasets": _listed(dataset),
            "repo_id": getattr(self, "hub_model_id", None),
            "adapter_name": name,
        }
        if holds_adapter(folder):
            assert run is not None
            assert name is not None
            training = run.record(model, name, read_training(folder))
            write_card(folder, [*run.results, *results], training=training, **arguments)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            put_card(folder, make_card(model, results, **arguments))


def _listed(names: str | Sequence[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())
