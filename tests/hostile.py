"""What hostile new users hit, and the tests that replay it: python -m tests.hostile

Each entry is a defect that was found by using Tandem as a careless user, an odd client or a strange
machine would, with the tests (pytest node ids) that failed before it was mended.
"""

import sys

import pytest

CLI, SERVER, HF = "tests/cli", "tests/server", "tests/hf"
OFFLOAD, KERNELS = "tests/experts", "tests/kernels"

DEFECTS: dict[str, tuple[str, ...]] = {
    "an answer depends on what else is in the batch": (
        f"{KERNELS}/test_batch_invariance.py",
        f"{KERNELS}/test_native.py::test_a_row_does_not_depend_on_its_company_or_on_threads",
        "tests/generate/test_scheduler.py::test_a_long_prompt_lets_streams_through_in_shorter_parts",
        f"{SERVER}/test_demo.py::test_four_at_once_are_answered_as_one_by_one",
    ),
    "memory and threads of a model never come back": (f"{HF}/test_lifetime.py",),
    'device_map="auto" fails': (
        f"{HF}/test_as_transformers.py::test_a_device_map_that_chooses_means_one_device",
    ),
    "a failed turn stays in the conversation": (
        "tests/generate/test_conversation.py",
        f"{CLI}/test_session.py",
        f"{SERVER}/test_trimming.py",
    ),
    "real clients are refused for harmless fields": (f"{SERVER}/test_foreign_fields.py",),
    "a refused request leaves no line in the log": (
        f"{SERVER}/test_options.py::test_a_refusal_is_one_line_of_log_without_the_prompt",
        f"{SERVER}/test_api.py::test_nothing_of_a_prompt_is_in_the_log",
    ),
    "a schema of 40 bytes stops all streams for minutes": (f"{SERVER}/test_grammars.py",),
    "lm-eval cannot score by API": (f"{SERVER}/test_scoring.py",),
    "text that is not UTF-8 is a traceback": (
        f"{CLI}/test_run.py::test_bytes_that_are_no_text_are_one_sentence",
        f"{CLI}/test_failures.py::test_paths_that_are_no_text_are_one_sentence",
        f"{CLI}/test_trace.py::test_prompts_that_are_no_text_are_refused",
    ),
    "a model without a tokenizer: the prompt is empty": (
        f"{CLI}/test_run.py::test_a_model_without_tokenizer_is_one_sentence",
    ),
    "closed streams, python -m tandem, sizes below zero, an empty name, errors under --json": (
        f"{CLI}/test_failures.py",
    ),
    "Ctrl-C during -p exits with 0": (
        f"{CLI}/test_interrupt.py::test_an_answer_that_is_stopped_is_printed_and_leaves_no_thread_and_whole_files",
    ),
    "a pipe beside -p is dropped; warnings show source lines": (
        f"{CLI}/test_run.py::test_a_pipe_is_put_before_the_prompt",
        f"{CLI}/test_run.py::test_a_warning_is_one_line_and_none_when_quiet",
    ),
    "a damaged cached profile stops the run": (
        f"{CLI}/test_profile.py::test_a_damaged_profile_is_measured_again_and_that_is_said",
    ),
    "INT4 is no format": (f"{CLI}/test_names.py",),
    "plan says that a checkpoint fits which lacks an expert": (
        "tests/forecast/test_plan.py::test_a_checkpoint_that_lacks_tensors_is_no_plan",
        "tests/forecast/test_doctor.py::test_a_lost_expert_of_any_layer_is_found",
    ),
    "a broken chat template is a traceback": (
        f"{CLI}/test_session.py::test_a_broken_template_is_one_sentence",
        f"{SERVER}/test_chat.py::test_a_broken_template_is_one_sentence_and_the_log_repeats_no_prompt",
    ),
    "NaN passes in silence": (f"{HF}/test_finite.py",),
    "device cuda: tiles larger than a card's shared memory, kernels compiled for each prompt": (
        f"{KERNELS}/test_triton.py",
    ),
    "device cuda: a failed load leaves memory pinned; the workspace is measured too large": (
        f"{HF}/test_cuda_machine.py::test_a_load_that_fails_leaves_nothing_pinned_and_no_limit",
        f"{HF}/test_cuda_machine.py::test_the_workspace_is_measured_with_the_logits_of_one_token",
        f"{HF}/test_cuda_machine.py::test_kernels_are_compiled_at_load_or_torch_computes_which_is_told",
    ),
    "device cuda: moved experts lie on small pages": (
        f"{OFFLOAD}/test_pinning.py::test_experts_moved_off_mapped_files_lie_as_packed_ones_do",
    ),
    "device cuda: sinks make all scores of a prompt": (f"{HF}/test_cuda_kv_cache.py",),
    "device cuda: times are of the cache, without the host's work": (
        f"{OFFLOAD}/test_cuda_profile.py",
    ),
    "device cuda: a plan changes the last bits; timed events cost the host": (
        f"{OFFLOAD}/test_cuda.py::test_plans_change_the_last_bits_on_a_gpu_and_no_more",
        f"{OFFLOAD}/test_cuda.py::test_batches_are_timed_only_while_somebody_watches",
        f"{OFFLOAD}/test_cuda.py::test_before_ampere_tiles_are_those_of_ordinary_cores",
    ),
    "device cuda: forced routing waits twice a layer": (f"{OFFLOAD}/test_cuda_forced_routing.py",),
    "device cuda: driver functions of another version": (f"{OFFLOAD}/test_cuda_batch_copy.py",),
    "the CPU starts last, and learning delays the next layer": (
        f"{OFFLOAD}/test_hybrid_executor.py::test_the_cpu_begins_before_the_device_is_given_work",
        f"{OFFLOAD}/test_hybrid_executor.py::test_a_caller_that_defers_hears_the_same_a_layer_later",
    ),
    "config.json, shapes and layers that cannot be": (f"{HF}/test_bad_input.py",),
    "copies without experts are written in silence": (f"{HF}/test_copies.py",),
    "adapters and the Trainer": (f"{HF}/test_adapters.py",),
    "any model name, strict schemas, dense models": (
        f"{SERVER}/test_options.py",
        f"{SERVER}/test_foreign_fields.py::test_a_strict_schema_is_closed",
    ),
    "messages speak of pydantic's inner names": (
        f"{SERVER}/test_api.py::test_a_bad_field_is_named",
    ),
}


def node_ids() -> list[str]:
    """Return the tests of all defects, each once."""
    return list(dict.fromkeys(node for nodes in DEFECTS.values() for node in nodes))


if __name__ == "__main__":
    sys.exit(pytest.main([*node_ids(), *sys.argv[1:]]))
