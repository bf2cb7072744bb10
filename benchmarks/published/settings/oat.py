"""oat and understand-r1-zero: the rows of Oat-Zero, of PPO on GSM8K and of GRPO on Countdown.

Sources: oat at 59eb01b (Oat-Zero), b966394 (GSM8K) and 56b9b57 (Countdown), understand-r1-zero at
8d31b35 (March 2025).
"""

from benchmarks.published.settings.row import PublishedRun, Row, differing

# What all commands of oat leave at its default, and what the runs have in common.
OAT = (
    Row("train_split", "train", "task.train_split", "", "the default is train"),
    Row("max-train", "9999999", "task.max_train", 0, "0 is all rows"),
    Row("learning_rate", "1e-6", "optimizer.lr", 1e-6),
    Row("(AdamW, first beta)", "0.9", "optimizer.b1", 0.9),
    Row("(AdamW, second beta)", "0.95", "optimizer.b2", 0.95),
    Row("(AdamW, epsilon)", "1e-8", "optimizer.eps", 1e-8),
    Row("(AdamW, weight decay)", "0", "optimizer.weight_decay", 0.0),
    Row("(largest gradient norm)", "1", "optimizer.clip_norm", 1.0),
    Row("(lower clip of the ratio)", "0.2", "algorithm.surrogate.low", 0.2),
    Row("(upper clip of the ratio)", "0.2", "algorithm.surrogate.high", 0.2),
    Row("kl_penalty_coef", "0", "algorithm.kl_reward", 0.0),
    Row("(top_k)", "-1", "rollout.top_k", 0, "no bound"),
    Row("rnd-seed", "drawn at random", "train.seed", 0, "one draw, so that a run can be repeated"),
    Row(
        "(last prompts of a pass)",
        "left out",
        "task.drop_last",
        True,
        "as PyTorch's DataLoader with drop_last",
    ),
)


# understand-r1-zero: Oat-Zero.

OAT_ZERO = (
    *OAT,
    Row("num_prompt_epoch", "20", "train.prompt_epochs", 20.0, "12,000 problems: 1,860 steps"),
    Row("prompt_max_length", "1024", "rollout.max_prompt_tokens", 1024),
    Row("rollout_batch_size", "128", "rollout.num_prompts", 128),
    Row("num_samples", "8", "rollout.group_size", 8),
    Row("train_batch_size", "128", "train.minibatches", 8, "128 * 8 responses in 8 parts"),
    Row("num_ppo_epochs", "1", "train.epochs", 1),
    Row("temperature", "1", "rollout.temperature", 1.0),
    Row("top_p", "1", "rollout.top_p", 1.0),
    Row("generate_max_length", "3000", "rollout.max_new_tokens", 3000),
    Row("critic_type", "drgrpo", "algorithm.advantage", "group_mean"),
    Row("critic_type", "drgrpo", "algorithm.weight", "constant"),
    differing(
        "(divisor of a response's sum)",
        "3,000 in the paper, 1 in the code at its release",
        "algorithm.weight.length",
        3000,
        "the paper's; the algorithm drgrpo_release has the other, and which of the two made the "
        "figures is not published",
    ),
    Row("beta", "0", "algorithm.kl.coef", 0.0),
    Row("(score without an end)", "0", "algorithm.truncated", "fixed"),
    Row("(score without an end)", "0", "algorithm.truncated.score", 0.0),
    Row("ignore_no_eos", "False", "algorithm.truncated", "fixed", "True is truncated=ignore"),
    Row("(reward_scale)", "1", "task.reward.weights", (), "one reward with the weight 1"),
    Row("(seconds to grade)", "1", "task.grade_seconds", 1.0, "then 0"),
    Row("(importance sampling, tis_c)", "none", "algorithm.correction", "auto"),
    Row("(old log-probs)", "of the learner", "algorithm.old_policy", "trainer"),
    Row("lr_scheduler", "constant", "optimizer.schedule", "constant"),
    Row("eval_steps", "16", "eval.every", 16),
    Row("eval_temperature", "0", "eval.samples", 0, "greedy decoding alone"),
    Row("eval_generate_max_length", "3000", "rollout.max_new_tokens", 3000),
    Row(
        "eval_data",
        "aime, amc, math, minerva, olympiad_bench",
        "eval.suites",
        ("aime24", "amc", "math500", "minerva", "olympiad_bench"),
        topic="evaluation",
    ),
    differing(
        "(verifier of the published figures)",
        "the full one, in evaluate_model.py",
        "",
        None,
        "evaluations in training have the run's verifier, there and here: for the figures evaluate "
        "with task.verifier=oat_full, or oat_r1_full after r1",
        topic="evaluation",
    ),
    differing(
        "(metrics of an evaluation)",
        "accuracy, score and length of each benchmark, and their averages",
        "",
        None,
        "docs/reference/metrics.md has the names of jzero's",
        topic="evaluation",
    ),
    Row("(evaluation before the first step)", "yes", "", None, "always", topic="evaluation"),
    Row("(responses of an evaluation)", "written", "eval.save_responses", True),
)

QWEN_MATH = (
    Row("prompt_template", "qwen_math", "task.template", "qwen_math", topic="prompt"),
    Row("(stop strings)", "none", "rollout.stop", (), topic="stops"),
)
R1 = (
    differing(
        "prompt_template",
        "r1",
        "task.template",
        "r1",
        "the same request in other words; task.template=FILE takes the published ones",
        topic="prompt",
    ),
    Row("(stop strings)", "</answer>", "rollout.stop", ("</answer>",), topic="stops"),
    Row("(stop string is kept)", "True", "rollout.keep_stop", True),
)
QWEN_MATH_1_5B = (
    Row("pretrain", "Qwen/Qwen2.5-Math-1.5B", "model.path", "Qwen/Qwen2.5-Math-1.5B"),
)
LLAMA_3B = (
    Row(
        "pretrain",
        "lkevinzc/Llama-3.2-3B-NuminaQA",
        "model.path",
        "lkevinzc/Llama-3.2-3B-NuminaQA",
    ),
)
MATH_12K = (
    Row("prompt_data", "math_12k", "task.data", "lkevinzc/math-12k"),
    Row("input_key", "problem", "task.problem_column", "problem"),
    Row("output_key", "answer", "task.answer_column", "answer"),
)
RIGHT_OR_WRONG = Row(
    "(reward values)",
    "1 and 0",
    "task.reward.functions",
    ("accuracy",),
    "1 for a right answer",
    topic="rewards",
)
FAST = (
    Row("verifier_version", "fast", "task.verifier", "oat_fast", topic="verifier"),
    RIGHT_OR_WRONG,
)
FAST_R1 = (
    Row("verifier_version", "fast", "task.verifier", "oat_r1", topic="verifier"),
    RIGHT_OR_WRONG,
)
FULL = (
    Row("verifier_version", "math_verify", "task.verifier", "oat_full", topic="verifier"),
    RIGHT_OR_WRONG,
)
FULL_R1 = (
    Row("verifier_version", "math_verify", "task.verifier", "oat_r1_full", topic="verifier"),
    RIGHT_OR_WRONG,
)
MATH_LEVELS_3_TO_5 = (
    Row("pretrain", "Qwen/Qwen2.5-Math-7B", "model.path", "Qwen/Qwen2.5-Math-7B"),
    differing(
        "prompt_data",
        "math_lvl3to5_8k",
        "task.data",
        "RLAIF/math",
        "the published set is a directory of the repository, which task.data takes; here are the "
        "levels 3 to 5 of MATH without MATH-500",
    ),
    Row("(lowest level)", "3", "task.level_min", 3),
    Row("(highest level)", "5", "task.level_max", 5),
    Row("input_key", "problem", "task.problem_column", "problem"),
    Row("output_key", "answer", "task.answer_column", "answer"),
)
OAT_ZERO_1_5B = "sail-sg/understand-r1-zero, examples/qwen2.5-math-1.5b.sh"
OAT_ZERO_3B = "sail-sg/understand-r1-zero, examples/llama3.2-3b-numinaqa.sh"
OAT_ZERO_7B = "sail-sg/understand-r1-zero, examples/qwen2.5-math-7b.sh"


# oat.

OAT_EXAMPLES = "sail-sg/oat, docs/reasoning_examples.md"

OAT_JANUARY_2025 = (
    *OAT,
    Row("(old log-probs)", "of the engine", "algorithm.old_policy", "sampler"),
    Row("(whitened advantages)", "always", "algorithm.whiten", True),
    Row("(largest KL of a token)", "10", "algorithm.kl.bound", 10.0),
    Row("(KL of a response)", "sum", "algorithm.kl.weight", "sequence_sum"),
    Row("non_stop_penalty", "0", "algorithm.truncated_penalty", 0.0),
    differing(
        "top_p",
        "0.9",
        "rollout.top_p",
        1.0,
        "the ratio is to the sampler, which has to bound the tokens it keeps: rollout.top_k=512 "
        "rollout.top_p=0.9 is nearly as published",
    ),
    Row("generate_max_length", "1024", "rollout.max_new_tokens", 1024),
    Row("eval_generate_max_length", "1024", "rollout.max_new_tokens", 1024),
)

OAT_GSM8K = (
    *OAT_JANUARY_2025,
    Row("pretrain", "lkevinzc/rho-1b-sft-GSM8K", "model.path", "lkevinzc/rho-1b-sft-GSM8K"),
    Row(
        "apply-chat-template", "the model's", "task.template", "chat", "the model's", topic="prompt"
    ),
    Row("(system prompt)", "none", "task.system_prompt", "none", topic="prompt"),
    Row(
        "(stop strings)",
        "\\n\\nQuestion, \\n\\nProblem",
        "rollout.stop",
        ("\n\nQuestion", "\n\nProblem"),
        topic="stops",
    ),
    Row("(stop string is kept)", "False", "rollout.keep_stop", False),
    differing(
        "(first token)",
        "of the sampler",
        "",
        None,
        "a prompt begins with <s> only where the chat template writes it",
    ),
    Row("prompt_data", "lkevinzc/gsm8k", "task.data", "lkevinzc/gsm8k"),
    Row("input_key", "question", "task.problem_column", "question"),
    Row("output_key", "final_answer", "task.answer_column", "final_answer"),
    Row("oracle", "gsm8k", "task.verifier", "last_number", topic="verifier"),
    RIGHT_OR_WRONG,
    Row("(reward_scale)", "1", "task.reward.weights", (), "one reward with the weight 1"),
    Row("num_prompt_epoch", "6", "train.prompt_epochs", 6.0, "7,473 problems: 696 steps"),
    Row("prompt_max_length", "1000", "rollout.max_prompt_tokens", 1000),
    Row("rollout_batch_size", "64", "rollout.num_prompts", 64),
    Row("num_samples", "8", "rollout.group_size", 8),
    Row("train_batch_size", "64", "train.minibatches", 8, "64 * 8 responses in 8 parts"),
    Row("num_ppo_epochs", "2", "train.epochs", 2),
    Row("temperature", "1.2", "rollout.temperature", 1.2),
    Row("(critic_type)", "ppo", "algorithm.advantage", "gae"),
    Row("(gamma)", "1", "algorithm.advantage.gamma", 1.0),
    Row("(lambda)", "1", "algorithm.advantage.lam", 1.0),
    Row("(clip of values)", "0.2", "algorithm.advantage.value_clip", 0.2),
    Row("(vf_coef)", "1", "algorithm.advantage.value_coef", 1.0, "of half the squared error"),
    Row("beta", "1e-4", "algorithm.kl.coef", 1e-4),
    Row("critic_learning_rate", "1e-6", "critic.lr", 1e-6),
    Row("lr_scheduler", "polynomial", "optimizer.schedule", "polynomial"),
    Row("(power)", "1", "optimizer.schedule.power", 1.0),
    Row("(last rate)", "1e-7", "optimizer.schedule.min_lr_ratio", 0.1, "of 1e-6"),
    Row("(lr_warmup_ratio)", "0.03", "optimizer.warmup.ratio", 0.03),
    Row("(first rate of the warm-up)", "0", "optimizer.warmup.from_zero", True),
    Row("max_step_adjustment", "16", "", None, "the schedule counts optimizer steps by itself"),
    Row("max_eval", "1500", "eval.problems", 1319, "the whole test split"),
    Row("eval_steps", "50", "eval.every", 50),
    Row("eval_temperature", "0.35", "eval.temperature", 0.35),
    Row("eval_top_p", "0.9", "eval.top_p", 0.9),
    Row("eval_n", "16", "eval.samples", 16, topic="evaluation"),
    differing(
        "(greedy evaluation)", "none", "eval.greedy", True, "measured as well", topic="evaluation"
    ),
    differing(
        "(metrics of an evaluation)",
        "share of scores above 1/2, mean score, length in characters",
        "",
        None,
        "the accuracy is that share, and lengths are in tokens",
        topic="evaluation",
    ),
)

OAT_COUNTDOWN = (
    *OAT_JANUARY_2025,
    Row("pretrain", "Qwen/Qwen2.5-3B", "model.path", "Qwen/Qwen2.5-3B"),
    Row("prompt_data", "lkevinzc/CountDownZero", "task.data", "lkevinzc/CountDownZero"),
    Row("input_key, output_key", "input, gt_answer", "", None, "found by their names"),
    Row(
        "(prompt)",
        "in the data",
        "",
        None,
        "a prompt of the data is taken as it is",
        topic="prompt",
    ),
    Row("oracle", "countdown", "task.verifier", "oat_countdown", topic="verifier"),
    Row(
        "(reward values)",
        "1, 0.1 and 0",
        "task.reward.functions",
        ("accuracy",),
        "0.1 for an answer in its tags that is wrong",
        topic="rewards",
    ),
    Row("(reward_scale)", "1", "task.reward.weights", (), "one reward with the weight 1"),
    Row(
        "(stop strings)",
        "\\nUser:, <\\|im_end\\|>, </s>, <\\|endoftext\\|>",
        "rollout.stop",
        ("\nUser:", "<|im_end|>", "</s>"),
        "<\\|endoftext\\|> is the model's end of sequence",
        topic="stops",
    ),
    Row("(stop string is kept)", "False", "rollout.keep_stop", False),
    Row("num_prompt_epoch", "1", "train.prompt_epochs", 1.0),
    Row("prompt_max_length", "256", "rollout.max_prompt_tokens", 256),
    Row("rollout_batch_size", "128", "rollout.num_prompts", 128),
    Row("num_samples", "8", "rollout.group_size", 8),
    Row("train_batch_size", "128", "train.minibatches", 8, "128 * 8 responses in 8 parts"),
    Row("num_ppo_epochs", "1", "train.epochs", 1),
    Row("temperature", "1", "rollout.temperature", 1.0),
    Row("critic_type", "grpo", "algorithm.advantage", "group_mean_std"),
    Row("(added to the deviation)", "1e-4", "algorithm.advantage.eps", 1e-4),
    Row("beta", "0.001", "algorithm.kl.coef", 1e-3),
    Row("(lr_scheduler)", "cosine_with_min_lr", "optimizer.schedule", "cosine"),
    Row("(last rate)", "0.1 of the first", "optimizer.schedule.min_lr_ratio", 0.1),
    Row("lr_warmup_ratio", "1e-7", "optimizer.warmup.ratio", 1e-7, "one step"),
    Row("(first rate of the warm-up)", "0", "optimizer.warmup.from_zero", True),
    Row("max_step_adjustment", "8", "", None, "the schedule counts optimizer steps by itself"),
    Row("eval_steps", "8", "eval.every", 8),
    Row("eval_temperature", "0", "eval.samples", 0, "greedy decoding alone"),
    Row("eval_split", "test", "", None, "held out are the problems of the test split"),
    Row("(max_eval)", "1000", "eval.problems", 1000, topic="evaluation"),
    differing(
        "(metrics of an evaluation)",
        "share of scores above 1/2, mean score, length in characters",
        "",
        None,
        "the accuracy is that share, and lengths are in tokens",
        topic="evaluation",
    ),
)

OAT_RUNS = (
    PublishedRun(
        "Oat-Zero-1.5B, template qwen_math",
        OAT_ZERO_1_5B,
        "math",
        "oat-zero-1.5b",
        "qwen_math",
        (*QWEN_MATH_1_5B, *MATH_12K, *FAST, *QWEN_MATH, *OAT_ZERO),
    ),
    PublishedRun(
        "Oat-Zero-1.5B, template r1",
        OAT_ZERO_1_5B,
        "math",
        "oat-zero-1.5b-r1",
        "r1",
        (*QWEN_MATH_1_5B, *MATH_12K, *FAST_R1, *R1, *OAT_ZERO),
    ),
    PublishedRun(
        "Oat-Zero-3B, template r1",
        OAT_ZERO_3B,
        "math",
        "oat-zero-3b",
        "r1",
        (*LLAMA_3B, *MATH_12K, *FAST_R1, *R1, *OAT_ZERO),
    ),
    PublishedRun(
        "Oat-Zero-7B, template qwen_math",
        OAT_ZERO_7B,
        "math",
        "oat-zero-7b",
        "qwen_math",
        (*MATH_LEVELS_3_TO_5, *FULL, *QWEN_MATH, *OAT_ZERO),
    ),
    PublishedRun(
        "Oat-Zero-7B, template r1",
        OAT_ZERO_7B,
        "math",
        "oat-zero-7b-r1",
        "r1",
        (*MATH_LEVELS_3_TO_5, *FULL_R1, *R1, *OAT_ZERO),
    ),
    PublishedRun("oat, PPO on GSM8K", OAT_EXAMPLES, "gsm8k", "rho-1b-ppo", "gsm8k", OAT_GSM8K),
    PublishedRun(
        "oat, GRPO on Countdown", OAT_EXAMPLES, "countdown", "oat-3b", "countdown", OAT_COUNTDOWN
    ),
)
