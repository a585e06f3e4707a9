"""The invariants that a routed model keeps, and the tests that show each of them.

    python -m pytest tests --junitxml report.xml && python tests/helpers/invariants.py report.xml

prints how many cases of every invariant ran and passed in every family. A test without a family in
its id counts under "any".
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "olmoe",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt2",
    "any",
)

# number: (what holds, test file -> tests)
INVARIANTS: dict[int, tuple[str, dict[str, tuple[str, ...]]]] = {
    1: (
        "a disabled, unloaded or deleted adapter leaves the base, also after an exception",
        {
            "test_invariants_state": (
                "test_disabled_adapter_equals_base",
                "test_state_is_restored_after_an_exception",
                "test_unloaded_model_equals_base",
                "test_deleted_adapter_equals_base",
            ),
            "test_injection": ("test_unload_restores_everything",),
        },
    ),
    2: (
        "budget 1.0 is the base, and a lower one is not",
        {
            "test_invariants_state": (
                "test_full_budget_equals_base",
                "test_full_budget_equals_base_in_training_mode",
                "test_full_budget_without_a_branch_equals_base",
            ),
            "test_memory": ("test_a_gate_that_is_forced_to_zero_leaves_the_base_bit_for_bit",),
        },
    ),
    3: (
        "saved and loaded in a fresh process with another seed",
        {
            "test_loading": (
                "test_every_loader_gives_the_same_model",
                "test_another_process_with_another_seed_loads_the_same_model",
            )
        },
    ),
    4: (
        "save, load, save: the same keys, dtypes and bytes, for any adapter name",
        {
            "test_loading": (
                "test_any_adapter_name_gives_the_same_model",
                "test_saving_what_was_loaded_gives_the_same_bytes",
            ),
            "test_golden": ("test_a_golden_adapter_is_what_it_was",),
        },
    ),
    5: (
        "prefill, token by token, chunks, static cache, reordered and cropped caches",
        {
            "test_invariants_causal": (
                "test_cached_continuation_equals_prefill",
                "test_decode_equals_prefill_with_a_gate_on_the_residual_stream",
                "test_bfloat16_decode_flips_only_close_decisions",
            ),
            "test_invariants_execution": (
                "test_static_cache_generates_what_the_dynamic_cache_does",
            ),
            "test_sequences": (
                "test_continued_prompt_equals_a_run_with_the_prompts_decision",
                "test_reordered_cropped_repeated_and_selected_caches_keep_the_decision",
            ),
            "test_decode": ("test_equal_the_general_pass",),
            "test_memory": (
                "test_a_cached_continuation_is_the_prefill",
                "test_generation_with_a_cache_is_generation_without",
            ),
        },
    ),
    6: (
        "later tokens change nothing earlier",
        {
            "test_invariants_causal": (
                "test_later_tokens_change_no_earlier_decision_and_no_earlier_logit",
            )
        },
    ),
    7: (
        "padding changes nothing and uses no budget",
        {
            "test_invariants_causal": (
                "test_padding_changes_no_decision_and_no_logit",
                "test_training_budget_counts_real_tokens_only",
            ),
            "test_invariants_execution": ("test_left_padding_changes_no_generated_token",),
        },
    ),
    8: (
        "batch composition, row order, packed documents",
        {
            "test_invariants_causal": (
                "test_row_order_changes_no_decision_and_no_logit",
                "test_batch_composition_changes_no_decision_and_no_logit",
                "test_packed_documents_get_the_decisions_of_separate_ones",
            )
        },
    ),
    9: (
        "gathered is masked, forward and gradients; only the chosen rows run",
        {
            "test_invariants_execution": (
                "test_prefill_computes_the_chosen_rows_only",
                "test_decode_computes_the_chosen_rows_only",
                "test_generate_computes_the_chosen_rows_only",
                "test_gathered_forward_and_gradients_equal_masked",
                "test_gathered_update_equals_masked_update",
            ),
            "test_sequences": ("test_gathered_equals_masked",),
        },
    ),
    10: (
        "a skipped attention writes keys and values; caches have the right length",
        {
            "test_sequences": (
                "test_skipped_sequences_write_no_keys_and_run_no_row",
                "test_reordered_cropped_repeated_and_selected_caches_keep_the_decision",
            ),
            "test_invariants_causal": ("test_cached_continuation_equals_prefill",),
        },
    ),
    11: (
        "gradient checkpointing, both modes",
        {
            "test_trainer": (
                "test_checkpointing_changes_no_loss_no_gradient_and_no_trace",
                "test_checkpointing_trains_to_the_same_parameters",
                "test_a_backward_pass_after_the_recording_block_recomputes_the_same_forward",
            )
        },
    ),
    12: (
        "auxiliary losses count once",
        {
            "test_trainer": (
                "test_four_equal_accumulated_batches_count_as_one",
                "test_accumulated_batches_of_equal_size_add_up_to_the_whole_batch",
                "test_the_last_step_of_an_epoch_counts_once_although_it_accumulates_less",
            ),
            "test_distributed": (
                "test_two_processes_have_the_loss_and_the_gradients_of_one",
                "test_sharded_processes_have_the_loss_and_the_gradients_of_one",
            ),
        },
    ),
    13: (
        "every trainable parameter gets a gradient, no base parameter does",
        {
            "test_trainer": (
                "test_every_trainable_parameter_gets_a_gradient_and_no_base_parameter_does",
                "test_every_variant_trains_all_of_its_parameters",
            )
        },
    ),
    14: (
        "compiled is eager",
        {
            "test_compile": (
                "test_compiled_decoding_skips_and_gives_the_eager_tokens",
                "test_compiled_prefill_equals_eager",
                "test_a_compiled_trainer_makes_the_steps_of_a_plain_one",
            )
        },
    ),
    15: (
        "resumed is uninterrupted",
        {
            "test_trainer": ("test_a_resumed_run_ends_where_an_uninterrupted_one_does",),
            "test_kill": ("test_a_killed_run_resumes_to_the_end_of_an_uninterrupted_one",),
        },
    ),
    16: (
        "two processes are one, also when one of them routes nothing",
        {
            "test_distributed": (
                "test_two_processes_have_the_loss_and_the_gradients_of_one",
                "test_sharded_processes_have_the_loss_and_the_gradients_of_one",
                "test_a_rank_really_routed_nothing",
                "test_a_trainer_in_two_processes_trains_the_adapter_of_one",
            )
        },
    ),
    17: (
        "two adapters, back and forth, and the inactive one deleted",
        {
            "test_invariants_state": ("test_switching_adapters_back_restores_the_first",),
            "test_coexistence": ("test_two_adapters_with_different_layers_switch",),
        },
    ),
    18: (
        "with LoRA below and on top",
        {
            "test_lora": (
                "test_sparse_execution_over_lora_equals_the_masked_computation",
                "test_decoding_over_lora_equals_prefill",
                "test_disabling_either_gives_the_base_and_budget_one_gives_lora_alone",
                "test_what_cannot_work_is_refused",
            ),
            "test_coexistence": (
                "test_lora_below_is_kept",
                "test_lora_on_top_reaches_routed_layers_and_can_be_merged",
            ),
        },
    ),
    19: (
        "bfloat16, float16 and autocast: finite, with float32 scores",
        {
            "test_invariants_execution": (
                "test_low_precision_is_finite_with_float32_scores",
                "test_autocast_is_finite_with_float32_scores",
            ),
            "test_invariants_causal": ("test_bfloat16_decode_flips_only_close_decisions",),
        },
    ),
    20: (
        "low_cpu_mem_usage, the meta device, offloaded weights",
        {
            "test_loading": ("test_every_loader_gives_the_same_model",),
            "test_injection": ("test_injection_on_the_meta_device_allocates_nothing",),
            "test_coexistence": (
                "test_routing_works_over_offloaded_weights",
                "test_device_map_while_loading",
            ),
        },
    ),
    21: (
        "the same seed in another process",
        {
            "test_loading": ("test_another_process_with_another_seed_loads_the_same_model",),
            "test_cli": ("test_the_same_seed_trains_the_same_adapter",),
        },
    ),
    22: (
        "a NaN row touches its own sequence only",
        {
            "test_invariants_execution": (
                "test_bad_row_stays_in_its_own_sequence_and_is_never_selected",
            )
        },
    ),
    23: (
        "ties go to the lowest index, and k is exact",
        {
            "test_selection": (
                "test_count_is_exact_for_every_percent_and_length",
                "test_topk_chooses_exactly_the_count",
                "test_ties_go_to_the_lowest_indices_and_the_count_is_exact",
            )
        },
    ),
    24: (
        "length 0 and 1, a row of padding",
        {
            "test_invariants_execution": (
                "test_one_token_and_all_padding_rows_run",
                "test_no_token_at_all_runs",
            )
        },
    ),
}


def family_of(case: str) -> str:
    """The family in a test's id, such as `test_x[qwen2_moe-mlp]`."""
    words = re.split(r"[\[\]-]", case)
    return next((family for family in FAMILIES if family in words), "any")


def table(report: str) -> str:
    """Markdown: invariants x families, `passed/run`."""
    run: Counter[tuple[int, str]] = Counter()
    passed: Counter[tuple[int, str]] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        file, name = case.attrib["classname"].split(".")[-1], case.attrib["name"]
        if case.find("skipped") is not None:
            continue
        for number, (_, files) in INVARIANTS.items():
            if name.split("[")[0] in files.get(file, ()):
                cell = number, family_of(name)
                run[cell] += 1
                passed[cell] += case.find("failure") is None and case.find("error") is None
    lines = [f"| # | invariant | {' | '.join(FAMILIES)} |", f"|---|---|{'---|' * len(FAMILIES)}"]
    for number, (what, _) in INVARIANTS.items():
        cells = [
            f"{passed[number, f]}/{run[number, f]}" if run[number, f] else "" for f in FAMILIES
        ]
        lines.append(f"| {number} | {what} | {' | '.join(cells)} |")
    lines.append(f"\n{sum(passed.values())} of {sum(run.values())} cases passed.")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(sys.argv[1]))
