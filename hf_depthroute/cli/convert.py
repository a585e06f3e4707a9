"""`hf-depthroute convert`: a published checkpoint that routes tokens, as an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..files.shown import counted, say
from . import options as o
from .errors import ADAPTER
from .output import check_out


def convert(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint's folder or its Hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the adapter.")],
    base: Annotated[
        str | None,
        typer.Option(
            help=(
                "The plain model whose weights the checkpoint has; by default that of the "
                "published one."
            )
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the adapter in --out.")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Turn FlexiDepth's checkpoint into an adapter on its plain base; none of its code runs.

    The layout is that of xuan-luo/FlexiDepth-Llama-3-8B-Instruct (arXiv:2503.23798). Its files are
    read tensor by tensor, so that neither a GPU nor memory for the whole model is needed.

    \b
    Examples:
      hf-depthroute convert xuan-luo/FlexiDepth-Llama-3-8B-Instruct --out flexidepth
      hf-depthroute generate flexidepth --prompt "The capital of France is"
    """
    from . import loading

    loading.quiet(debug)
    from ..adapter.convert import convert_flexidepth

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    folder = loading.folder_of("checkpoint", checkpoint, patterns, ADAPTER)
    config = convert_flexidepth(folder, check_out(out, overwrite), base)
    assert isinstance(config.layers, list)
    layers = " to ".join(map(str, dict.fromkeys((config.layers[0], config.layers[-1]))))
    say(
        f"{out}: {counted(len(config.layers), 'routed layer')} ({layers}), "
        f"gate width {config.gate_hidden}, branch width {config.branch_rank}, "
        f"on {config.base_model_name_or_path}"
    )
