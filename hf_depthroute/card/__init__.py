"""The model card of an adapter, made of its files and of what was measured;
no figure in it was typed by hand.

    card = make_card("adapter", results=["eval.json", "bench.json"])
    card.save("adapter/README.md")

`save_pretrained` and `push_to_hub` of a model with a routed adapter write one, and
`hf-depthroute card` is the same from the command line.
"""

from .measured import ResultError, add_results
from .page import make_card, write_card
from .push import push_folder

__all__ = ["ResultError", "add_results", "make_card", "push_folder", "write_card"]
