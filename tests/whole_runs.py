"""The slow tests that run by default, by the part of jzero that each of them runs as a whole.

Whatever they take, `pytest` runs them: every subsystem keeps one test of it at work from end to
end. tests/test_tiers.py checks that they exist and that the default tier stays in its budget.
A name without a case in brackets means all cases of the test.
"""

WHOLE_RUNS: dict[str, tuple[str, ...]] = {
    "answers": (
        "tests/answers/test_verdict.py::test_any_text_has_a_verdict_and_always_the_same",
        "tests/answers/test_characters.py::test_every_character_has_a_verdict",
        "tests/answers/test_published_verifiers.py::test_scores_are_the_original_scores[math_verify]",
        "tests/answers/test_neighbors.py::test_neighbors_of_every_kind_are_told_apart[1]",
    ),
    "grader processes": (
        "tests/workers/test_pool.py::test_pool_grades_as_a_direct_call_does",
        "tests/workers/test_pool.py::test_memory_is_bounded",
        "tests/workers/test_pool_attacks.py::test_honest_answers_survive_an_attack",
        "tests/workers/test_keeper.py::test_no_child_of_an_environment_outlives_the_run[asyncio-KILL]",
    ),
    "sandbox": (
        "tests/sandbox/test_sandbox.py::test_programs_do_not_meet_each_other",
        "tests/sandbox/test_session.py::"
        "test_a_cell_beyond_a_limit_ends_its_session_alone[namespaces-while True: pass-time]",
        "tests/sandbox/test_failures.py::test_nothing_outlives_a_client_that_is_killed",
        "tests/sandbox/test_residue.py::test_programs_hold_nothing_of_earlier_requests[namespaces]",
    ),
    "the loop of GRPO": (
        "tests/commands/test_main.py::test_a_run_leaves_its_files",
        "tests/loops/test_grpo_loop.py::test_rewards_equal_those_of_the_training_loop",
        "tests/training/test_learner.py::test_minibatches_and_epochs_are_clipped_steps_of_adamw",
        "tests/training/test_learner.py::test_gradient_does_not_depend_on_the_mesh[(2, 2, 2)]",
        "tests/training/test_slices.py::test_gradient_is_that_of_each_sequence_alone[4-(2, 1, 1)]",
        "tests/training/test_turns_in_training.py::"
        "test_only_targets_that_are_trained_change_the_gradient[False]",
    ),
    "the asynchronous loop": (
        "tests/rollout/test_async_stream.py::"
        "test_a_run_that_was_stopped_between_steps_ends_in_the_same_numbers",
    ),
    "PPO": (
        "tests/training/test_learner.py::"
        "test_values_and_their_loss_are_those_of_each_sequence_alone",
    ),
    "SFT": (
        "tests/test_sft.py::test_a_run_trains_on_the_examples_of_a_task",
        "tests/training/test_supervised.py::"
        "test_the_cross_entropy_has_the_gradient_of_a_surrogate_with_advantage_1",
    ),
    "distillation": (
        "tests/distillation/test_teachers.py::test_an_adapter_teaches_on_its_base[False]",
        "tests/distillation/test_teachers.py::test_self_distillation_is_its_definition[2]",
    ),
    "resuming": (
        "tests/run/test_checkpoint.py::test_a_resumed_run_equals_an_uninterrupted_one",
        "tests/run/test_checkpoint.py::test_a_kill_during_a_save_leaves_the_previous_step",
        "tests/run/test_metrics.py::"
        "test_the_files_of_a_killed_and_resumed_run_equal_those_of_an_uninterrupted_one",
    ),
    "hosts": ("tests/hosts/test_hosts.py::test_a_host_that_is_alone_says_so_and_ends",),
    "serving": (
        "tests/commands/test_serve.py::test_a_completion_is_the_schedulers",
        "tests/commands/test_serve.py::test_streams_are_the_same_text[chat-None]",
        "tests/commands/test_serve.py::test_requests_at_once_all_get_their_own_answer[100]",
        "tests/serving/test_scored.py::test_echo_has_the_prompts_log_probs_and_alternatives",
        "tests/serving/test_ending.py::test_a_request_that_runs_finishes_and_new_connections_are_refused",
        "tests/attacks/test_servers.py::test_no_client_keeps_others_waiting[serve]",
        "tests/attacks/test_servers.py::test_no_client_keeps_others_waiting[tinker]",
    ),
    "tinker": (
        "tests/tinker_api/test_tinker_command.py::test_a_killed_server_resumes_from_its_store",
        "tests/tinker_api/test_tinker_losses.py::"
        "test_the_loss_and_its_gradient_are_those_of_float64[ppo-1]",
        "tests/tinker_api/test_tinker_server.py::"
        "test_weights_for_samplers_are_sampled_by_path_and_load_as_peft",
        "tests/tinker_api/test_tinker_server.py::test_negative_weights_and_several_targets_train",
    ),
    "jobs": ("tests/jobs/test_stream.py::test_a_resumed_trainer_takes_the_results_that_it_had",),
    "decoder": (
        "tests/decoder/test_engine.py::"
        "test_completions_do_not_depend_on_the_arrangement[2 shards x tensor 2]",
        "tests/decoder/test_engine.py::test_completions_do_not_depend_on_the_arrangement[preempted]",
        "tests/decoder/test_engine.py::test_greedy_is_the_argmax_of_the_full_forward[qwen2]",
        "tests/decoder/test_drafts.py::test_every_kind_of_draft_gives_the_same_tokens[ngram-0.0]",
        "tests/decoder/test_prefix_cache.py::"
        "test_tokens_are_the_same_with_the_cache_and_without[0.0-few pages]",
        "tests/decoder/test_rings.py::test_tokens_are_those_of_layers_that_keep_all_pages[groups]",
        "tests/decoder/test_scoring.py::"
        "test_scores_are_the_whole_forwards_and_the_trainers[chunks of 16]",
        "tests/decoder/test_sampling.py::test_tokens_follow_the_softmax[1.0-90]",
        "tests/decoder/test_slot_state.py::test_no_sequence_sees_the_state_of_another[0]",
        "tests/decoder/test_turns.py::test_trajectories_hold_every_turn",
        "tests/decoder/test_turns.py::test_the_reward_of_a_turn_may_be_its_score",
        "tests/decoder/test_expert_rollouts.py::"
        "test_sampled_log_probs_are_those_of_the_trainer[qwen3_moe]",
    ),
    "adapters": (
        "tests/training/test_adapter_training.py::"
        "test_gradients_are_projections_of_the_whole_gradient[plain-(2, 2, 2)-native]",
    ),
    "quantization": (
        "tests/decoder/test_engine.py::test_8_bit_weights_are_near_and_need_their_scales[fp8-0.8]",
        "tests/training/test_frozen.py::test_a_base_is_quantized_as_the_function_says",
    ),
    "kernels": (
        "tests/attention/test_kernels.py::test_splash_equals_the_definition[qwen2.5-0.5b]",
        "tests/attention/test_kernels.py::test_heads_split_over_a_mesh_equal_whole_ones[4]",
        "tests/attention/test_kernels.py::"
        "test_windows_equal_the_definition[tpu-RowLayout(prefix=70, slots=3, slot=90)-window]",
        "tests/attention/test_kernels.py::test_paged_kernels_equal_the_definition[qwen2.5-0.5b]",
        "tests/attention/test_tpu_decode.py::"
        "test_the_kernel_equals_the_definition[bf16-qwen2.5-0.5b]",
    ),
    "exactness": (
        "tests/training/test_exactness.py::test_a_broken_rule_in_the_sampler_fails_by_name",
    ),
    "exports": (
        "tests/commands/test_main.py::test_export_loads_in_transformers_and_says_the_same",
        "tests/commands/test_export_adapter.py::test_without_the_flag_the_adapter_is_merged_once",
    ),
    "plans": (
        "tests/commands/test_plan.py::test_the_arithmetic_is_near_what_is_compiled",
        "tests/planning/test_planning.py::test_the_planned_batches_of_fine_tuning_are_those_of_a_run",
    ),
    "commands": (
        "tests/commands/test_front_door.py::"
        "test_the_choices_are_printed_and_the_run_ends_with_an_export",
        "tests/commands/test_generation_servers.py::test_every_row_is_there_once_after_two_stops[grouped]",
    ),
    "environments": (
        "tests/environments/test_openenv.py::test_an_episode_is_a_session_of_the_server",
        "tests/environments/test_agents.py::"
        "test_requests_that_continue_one_another_are_the_turns_of_one_sequence",
    ),
}
