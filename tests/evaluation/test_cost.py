"""`route_cost`: the paper's accounting and whole-model FLOPs."""

import pytest
import torch
from models import build_base
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from hf_depthroute import DepthRouteConfig, get_depth_routed_model, route_cost
from hf_depthroute.config.adapter import ConfigError


def paper_model(gate):
    config = GPT2Config(
        vocab_size=151_665, n_embd=640, n_layer=12, n_head=10, n_inner=2560, n_positions=768
    )
    with torch.device("meta"):
        base = GPT2LMHeadModel(config)
        return get_depth_routed_model(
            base, DepthRouteConfig(layers="last:4", gate=gate, branch_rank=80)
        )


@pytest.mark.parametrize(("gate", "digits", "ratio"), [("mlp", 3, 0.547), ("jepa", 4, 0.5525)])
def test_ffn_ratio_is_the_papers(gate, digits, ratio):
    assert round(route_cost(paper_model(gate), budget=0.5).ffn_ratio, digits) == ratio


def test_parameters_are_split_into_base_and_adapter():
    cost = route_cost(paper_model("jepa"))
    assert (cost.parameters_base, cost.parameters_trainable) == (156_640_640, 849_348)
    assert cost.parameters_adapter == 849_348 + 640 * 64


def test_dense_flops_are_two_per_weight_and_token_plus_attention():
    base = build_base("llama")
    layer = base.model.layers[0]
    matrices = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    tokens, pairs, width = 2 * 8, 8 * 9 // 2, 32
    expected = 2 * tokens * matrices * 4 + 4 * 4 * 2 * pairs * width + 2 * 2 * width * 64
    model = get_depth_routed_model(base, DepthRouteConfig())
    assert route_cost(model, batch_size=2, length=8).flops_dense == expected


class Packed(torch.nn.Module):
    """A linear map in 4 bits, in the form of GPTQ (buffers) or of bitsandbytes (two a byte)."""

    def __init__(self, linear, buffers):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None
        size = linear.weight.numel()
        if buffers:
            self.register_buffer("qweight", torch.zeros(size // 8, dtype=torch.int32))
        else:
            packed = torch.zeros(size // 2, 1, dtype=torch.uint8)
            self.weight = torch.nn.Parameter(packed, requires_grad=False)
            self.weight_scale = torch.nn.Parameter(torch.ones(self.out_features, 4))


@pytest.mark.parametrize("fields", [{}, {"branch": "neurons", "branch_rank": 8}])
@pytest.mark.parametrize("buffers", [True, False])
def test_a_base_in_four_bits_costs_what_it_costs_in_full(buffers, fields):
    base = build_base("llama")
    config = DepthRouteConfig(**fields)
    expected = route_cost(get_depth_routed_model(base, config), length=64)
    packed = build_base("llama")
    for layer in packed.model.layers:
        for part in (layer.mlp, layer.self_attn):
            for name, child in list(part.named_children()):
                if isinstance(child, torch.nn.Linear):
                    setattr(part, name, Packed(child, buffers))
    model = get_depth_routed_model(packed, config)
    assert route_cost(model, length=64) == expected
    assert model.model.model.layers[-1].routing.ffn_width == packed.config.intermediate_size


@pytest.mark.parametrize("cached", [0, 2, 9])
def test_a_query_meets_the_keys_in_its_window(cached):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = {"num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 5}
    base = MistralForCausalLM(MistralConfig(**sizes, **config))
    matrices = sum(p.numel() for p in base.model.layers.parameters() if p.ndim == 2)
    model = get_depth_routed_model(base, DepthRouteConfig())
    pairs = sum(min(5, cached + 1 + query) for query in range(7))
    cost = route_cost(model, length=7, cached=cached)
    assert cost.flops_dense == 2 * 7 * matrices + 2 * 4 * pairs * 32 + 2 * 32 * 64
    # What four tokens leave, in layers, keys and values, width, bytes.
    assert cost.kv_bytes == 2 * 4 * 2 * 32 * 4


def test_a_full_budget_saves_nothing_and_still_pays_the_gate():
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig())
    cost = route_cost(model, budget=1.0)
    assert cost.flops_ideal == cost.flops_dense < cost.flops_routed


def test_experts_count_by_the_share_a_token_meets():
    model = get_depth_routed_model(
        build_base("olmoe"), DepthRouteConfig(layers="all", branch="none")
    )
    cost = route_cost(model, batch_size=1, length=1, budget=0.5)
    per_expert = 3 * 32 * 64
    # 4 layers, top-2 of 4 experts, and the experts' own router.
    skipped = 4 * (2 * per_expert + 4 * 32)
    assert cost.flops_dense - cost.flops_ideal == 2 * 0.5 * skipped


@pytest.mark.parametrize(("expert_gates", "tokens"), [("per_expert", 0.75), ("per_layer", 0.5)])
def test_a_token_that_drops_one_of_its_experts_pays_for_the_whole_branch(expert_gates, tokens):
    fields = {"target": "experts", "layers": "all", "gate": "linear", "branch_rank": 8}
    model = get_depth_routed_model(
        build_base("olmoe"), DepthRouteConfig(**fields, expert_gates=expert_gates)
    )
    cost = route_cost(model, length=1, budget=0.5)
    gate = 32 * {"per_expert": 4, "per_layer": 1}[expert_gates]
    spent = gate + tokens * 2 * 8 * 32  # top-2: of four tokens one keeps both of its experts
    assert cost.flops_routed - cost.flops_ideal == 2 * 4 * spent
    assert cost.ffn_ratio == 0.5 + spent / (2 * 3 * 32 * 64)


def test_of_a_prompt_whose_end_runs_in_full_the_rest_alone_drops_experts():
    fields = {"target": "experts", "layers": "all", "gate": "linear", "branch_rank": 8}
    config = DepthRouteConfig(**fields, phases="prefill", prompt_tail=8)
    model = get_depth_routed_model(build_base("olmoe"), config)
    cost = route_cost(model, length=16, budget=0.5)
    spent = 32 * 4 + 0.5 * 0.75 * 2 * 8 * 32  # of eight tokens, two keep both of their experts
    assert cost.flops_routed - cost.flops_ideal == pytest.approx(2 * 4 * 16 * spent)


def test_no_budget_says_how_many_tokens_a_gate_of_sinks_runs_in_full():
    fields = {"layers": "all", "phases": "prefill", "prompt_tail": 4}
    ratios = {}
    for gate in ("sinks", "none"):
        config = DepthRouteConfig(gate=gate, **fields)
        ratios[gate] = route_cost(get_depth_routed_model(build_base("llama"), config), length=40)
    assert ratios["sinks"] == ratios["none"]
    assert ratios["sinks"].flops_routed < ratios["sinks"].flops_dense


def narrow(**fields):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
    }
    with torch.device("meta"):
        base = LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes))
        return get_depth_routed_model(base, DepthRouteConfig(layers="last:2", **fields))


def test_an_adapter_that_cannot_pay_for_itself_says_so_with_what_to_make_smaller():
    cost = route_cost(narrow(gate="jepa"))
    assert cost.flops_routed > cost.flops_dense
    saved = 2 * 0.5 * 2 * 3 * 64 * 160
    assert f"{cost.flops_routed / cost.flops_dense:.3g} of the dense FLOPs" in cost.remark
    assert f"save {saved:,.0f} FLOPs and spend " in cost.remark
    assert (
        "make context_dim (now 128), summary_dim (now 64), action_dim (now 16) smaller"
        in cost.remark
    )
    assert "\n" not in cost.remark


def test_remark_is_about_the_larger_part():
    wide = route_cost(narrow(branch_rank=256))
    assert (
        wide.flops_routed > wide.flops_dense and "make branch_rank (now 256) smaller" in wide.remark
    )
    assert (
        "make gate_hidden (now 250) smaller"
        in route_cost(narrow(gate_hidden=250, budget=0.9)).remark
    )
    lm_head = narrow(gate="exit", target="block", branch="none")
    assert "such as gate='linear'" in route_cost(lm_head, budget=0.9).remark


def test_an_adapter_that_saves_has_no_remark():
    for model in (
        narrow(),
        narrow(gate="linear", budget=0.99, branch="none"),
        narrow(gate="none"),
        paper_model("jepa"),
    ):
        cost = route_cost(model)
        assert cost.remark is None and cost.flops_routed < cost.flops_dense


def test_a_full_budget_has_no_remark_because_it_runs_no_gate():
    assert route_cost(narrow(gate="jepa"), budget=1.0).remark is None


def test_measured_shares_override_the_budget():
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig(layers=[2, 3]))
    even = route_cost(model, budget=0.5)
    assert route_cost(model, full_ratio={2: 0.25, 3: 0.75}).flops_routed == pytest.approx(
        even.flops_routed
    )
    assert route_cost(model, full_ratio={2: 0.25, 3: 0.25}).flops_routed < even.flops_routed


def test_decode_attends_to_the_cache_and_keeps_every_key():
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig())
    first, later = route_cost(model, length=1), route_cost(model, length=1, cached=100)
    assert later.flops_dense - first.flops_dense == 4 * 4 * 100 * 32
    assert later.kv_bytes == 2 * 4 * 101 * 2 * 8 * 4


def test_a_budget_out_of_range_is_refused():
    model = get_depth_routed_model(build_base("llama"), DepthRouteConfig())
    with pytest.raises(ConfigError, match="budget=0"):
        route_cost(model, budget=0)
