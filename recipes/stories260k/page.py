"""A pretrained Llama of width 64 on the page of results."""

from __future__ import annotations

import itertools

from pages import markdown_table
from study.page import Study, read


def study() -> Study:
    """The stories260k recipe at budget 0.5: learned gates, a random one, and FFNs left out,
    with the same branches."""
    result = read("stories260k/results.json")
    at_budget = {
        (row["gate"], row["gate_input"], tuple(row["layers"]), row["rule"]): row
        for row in result["summary"]
        if row["budget"] == 0.5
    }
    flops = {
        (c["gate"], c["gate_input"], tuple(c["layers"])): c["flops"]
        for c in result["flops_over_dense"]
    }
    dense = next(row for row in result["summary"] if row["rule"] == "dense")["loss"]
    routed, random = (2, 3, 4), at_budget["random", "normed", (2, 3, 4), "threshold"]
    static = {key[2]: row for key, row in at_budget.items() if key[0] == "none"}
    points = [(1.0, dense), *((1 - len(layers) / 5, row["loss"]) for layers, row in static.items())]
    points.sort(reverse=True)

    def dropped(share: float) -> float:
        """The loss of leaving FFNs out at a share of FFN calls,
        on straight lines between numbers of FFNs."""
        (high, above), (low, below) = next(
            pair for pair in itertools.pairwise(points) if pair[1][0] <= share
        )
        return above + (below - above) * (high - share) / (high - low)

    rows = []
    titles = {"mlp": "MLP", "jepa": "JEPA", "random": "random projection"}
    for gate, gate_input in (
        ("mlp", "normed"), ("jepa", "normed"), ("mlp", "residual"), ("jepa", "residual"),
        ("random", "normed")
    ):  # fmt: skip
        topk, causal = (at_budget[gate, gate_input, routed, rule] for rule in ("topk", "threshold"))
        share = (2 + 3 * causal["full_ratio"]) / 5
        to_random = "" if gate == "random" else f"{causal['loss'] - random['loss']:+.3f}"
        rows.append([
            f"{titles[gate]}, {gate_input}", f"{share:.2f}",
            f"{flops[gate, gate_input, routed]:.2f}",
            *(f"{row['loss']:.3f} ({row['loss_min']:.3f} - {row['loss_max']:.3f})" for row in (topk, causal)),
            to_random, f"{causal['loss'] - dropped(share):+.3f}", str(causal["seeds"]),
        ])  # fmt: skip
    for layers, row in sorted(static.items(), key=lambda item: len(item[0])):
        title = f"FFN{'s' * (len(layers) > 1)} of {', '.join(map(str, layers))} left out"
        loss = f"{row['loss']:.3f} ({row['loss_min']:.3f} - {row['loss_max']:.3f})"
        share, counted = f"{1 - len(layers) / 5:.2f}", f"{flops['none', 'normed', layers]:.2f}"
        rows.append([title, share, counted, "", loss, "", "", str(row["seeds"])])
    mlp, *residual = (
        at_budget[gate, gate_input, routed, "threshold"]
        for gate, gate_input in (("mlp", "normed"), ("mlp", "residual"), ("jepa", "residual"))
    )
    to_drop = mlp["loss"] - dropped((2 + 3 * mlp["full_ratio"]) / 5)
    to_random = " and ".join(f"{row['loss'] - random['loss']:+.3f}" for row in residual)
    brief = (
        f"FFNs of 3 of 5 layers at budget 0.5: loss {dense:.3f} dense, {mlp['loss']:.3f} with the "
        f"MLP gate ({to_drop:+.3f} to the least important FFNs left out at the same share), "
        f"{random['loss']:.3f} with a random gate. Gates that read the residual stream end no "
        f"lower than the random one ({to_random}); with the JEPA gate "
        f"{flops['jepa', 'normed', routed]:.2f} of the dense FLOPs at this width, as its study "
        "counts them"
    )
    section = [
        (
            "A real pretrained Llama of 260,000 parameters and width 64, FFNs of layers 2-4 of 5 "
            "routed at budget 0.5. Learned gates stand beside a frozen random one and beside the "
            "least important FFNs left out for every token, all with branches of rank 8 trained "
            "for 800 steps of 16 x 256 tokens. Validation loss in nats, mean over seeds (lowest - "
            f"highest); dense: {dense:.3f}. The two differences are those of the causal "
            "threshold's loss: to random routing, and to leaving these FFNs out at the same share "
            "of FFN calls. FLOPs are counted with the routers: at this width the JEPA gate costs "
            "more than it saves. What the branches are worth: random routing without any ends at "
            f"{result['random_routing_without_branch']:.3f}."
        ),
        "",
        *markdown_table(
            [
                "gate, input",
                "FFN calls",
                "FLOPs / dense",
                "top-k",
                "causal threshold",
                "to random",
                "to drop",
                "seeds",
            ],
            rows,
        ),
    ]
    command = "python recipes/stories260k/run.py --seeds 0 1 2"
    return Study("Quality: a pretrained Llama of width 64", "stories260k", command, brief, section)
