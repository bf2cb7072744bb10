"""open-r1: the rows of its GRPO recipes and of OpenR1-Distill-7B.

Sources: the recipes of github.com/huggingface/open-r1 at 1416fa0, the defaults of TRL 0.18.0 and of
transformers 4.52.3 for what they leave out. All three runs of GRPO share most rows. Three recipes
of February 2025 are of e4ac3ae, with the defaults of TRL at b9df810, the head of that day.
"""

from benchmarks.published.settings.row import PublishedRun, Row, differing

# TRL's GRPOTrainer and open-r1's grpo.py.

OF_BOTH_COMMITS = (
    differing(
        "system_prompt",
        "asks for thoughts and an answer in tags",
        "",
        None,
        "the same request in other words; task.system_prompt takes the published ones",
        topic="prompt",
    ),
    Row("(prompt)", "system prompt and problem, without an instruction", "", None, topic="prompt"),
    Row("(stop strings)", "none", "rollout.stop", (), topic="stops"),
    differing(
        "(prompts above max_prompt_length)",
        "their beginning is cut off",
        "",
        None,
        "dropped",
        topic="prompt",
    ),
    Row("num_train_epochs", "1", "train.epochs", 1, "passes over a step's responses: 1"),
    Row("(num_iterations)", "1", "train.minibatches", 1),
    Row("seed", "42", "train.seed", 42),
    Row("(top_p)", "1", "rollout.top_p", 1.0),
    Row("(top_k)", "none", "rollout.top_k", 0, "no bound"),
    Row("(scale_rewards)", "True", "algorithm.advantage", "group_mean_std"),
    Row("(added to the deviation)", "1e-4", "algorithm.advantage.eps", 1e-4),
    Row("(mask_truncated_completions)", "False", "algorithm.truncated", "grade"),
    Row("(sync_ref_model)", "False", "algorithm.reference_every", 0, "never"),
    Row("(AdamW, first beta)", "0.9", "optimizer.b1", 0.9),
    Row("(AdamW, second beta)", "0.999", "optimizer.b2", 0.999),
    Row("(AdamW, epsilon)", "1e-8", "optimizer.eps", 1e-8),
    Row("(weight_decay)", "0", "optimizer.weight_decay", 0.0),
    Row("(max_grad_norm)", "1", "optimizer.clip_norm", 1.0),
    Row("(first rate of the warm-up)", "0", "optimizer.warmup.from_zero", True),
)

GRPO = (
    *OF_BOTH_COMMITS,
    differing(
        "(loss_type)",
        "bnpo",
        "algorithm.weight",
        "token_mean",
        "the mean over tokens is over a microbatch of a device there, over the step here",
    ),
    Row("(epsilon)", "0.2", "algorithm.surrogate.low", 0.2),
    Row("(epsilon_high)", "epsilon", "algorithm.surrogate.high", 0.2, "0.2"),
)

MATH = (
    Row("dataset_name", "open-r1/OpenR1-Math-220k", "task.data", "open-r1/OpenR1-Math-220k"),
    Row("dataset_prompt_column", "problem", "task.data.problem", "problem"),
    Row(
        "reward_funcs",
        "accuracy, format, tag_count",
        "task.reward.functions",
        ("accuracy", "open_r1_format", "tag_count"),
        topic="rewards",
    ),
    Row("reward_weights", "1, 1, 1", "task.reward.weights", (1.0, 1.0, 1.0), topic="rewards"),
    Row(
        "(accuracy)",
        "math-verify on the first box or formula of the response",
        "task.verifier",
        "open_r1_1416fa0",
        "the function of the recipe's commit; the suites have eval.verifier=fast",
        topic="verifier",
    ),
    differing(
        "(gold that math-verify does not read)",
        "no reward",
        "",
        None,
        "pays 0 to every response; in a group neither is an advantage",
        topic="verifier",
    ),
    differing(
        "do_eval",
        "false; lighteval measures checkpoints",
        "eval.suites",
        ("math500", "aime24"),
        "jzero's own suites, greedy, before and after the run",
        topic="evaluation",
    ),
    Row("num_generations", "16", "rollout.group_size", 16),
    Row("(prompts in a step)", "32", "rollout.num_prompts", 32, "16 * 8 GPUs * 4 / 16"),
    Row("max_prompt_length", "512", "rollout.max_prompt_tokens", 512),
    Row("(beta)", "0.04", "algorithm.kl.coef", 0.04),
    Row("warmup_ratio", "0.1", "optimizer.warmup.ratio", 0.1),
    Row("max_steps", "-1: one pass", "train.steps", 2929, "93,733 problems, 32 in a step"),
)

INSTRUCT = (
    Row(
        "model_name_or_path",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "model.path",
        "Qwen/Qwen2.5-1.5B-Instruct",
    ),
    Row("(chat_template)", "the model's", "task.template", "chat", "the model's", topic="prompt"),
    *MATH,
    Row("max_completion_length", "1024", "rollout.max_new_tokens", 1024),
    Row("(temperature)", "1", "rollout.temperature", 1.0),
    Row("learning_rate", "2e-5", "optimizer.lr", 2e-5),
    Row("lr_scheduler_type", "cosine", "optimizer.schedule", "cosine"),
    Row("(last rate)", "0", "optimizer.schedule.min_lr_ratio", 0.0),
    *GRPO,
)

DISTILLED = (
    Row(
        "model_name_or_path",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "model.path",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    ),
    Row(
        "chat_template",
        "the model's, without the beginning of the thoughts",
        "task.template",
        "r1_distill_tags",
        "the same text around the question",
        topic="prompt",
    ),
    differing(
        "(first token in the sampler)",
        "the template's, and the tokenizer's before it",
        "",
        None,
        "TRL sends text to vLLM, whose tokenizer adds its own first token; here there is one",
        topic="prompt",
    ),
    *MATH,
    Row("max_completion_length", "2048", "rollout.max_new_tokens", 2048),
    Row("temperature", "0.7", "rollout.temperature", 0.7),
    Row("learning_rate", "1e-6", "optimizer.lr", 1e-6),
    Row("lr_scheduler_type", "cosine_with_min_lr", "optimizer.schedule", "cosine"),
    Row("min_lr_rate", "0.1", "optimizer.schedule.min_lr_ratio", 0.1),
    *GRPO,
)

CODE = (
    Row(
        "model_name_or_path",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "model.path",
        "Qwen/Qwen2.5-1.5B-Instruct",
    ),
    Row("(chat_template)", "the model's", "task.template", "chat", "the model's", topic="prompt"),
    differing(
        "(user's message)",
        "the problem",
        "",
        None,
        "the problem and a sentence on the form of the program; "
        "task.template=chat:FILE with {question} in it has the problem only",
        topic="prompt",
    ),
    Row(
        "dataset_name",
        "open-r1/verifiable-coding-problems-python",
        "task.data",
        "open-r1/verifiable-coding-problems-python",
    ),
    Row(
        "reward_funcs",
        "code, format",
        "task.reward.functions",
        ("code", "open_r1_format"),
        topic="rewards",
    ),
    Row("reward_weights", "1, 0.1", "task.reward.weights", (1.0, 0.1), topic="rewards"),
    differing(
        "(outputs of programs)",
        "compared line by line, up to the end of the shorter one",
        "",
        None,
        "compared word by word",
        topic="verifier",
    ),
    differing(
        "(tests of a problem)",
        "all",
        "",
        None,
        "the 15 with the longest inputs",
        topic="verifier",
    ),
    differing(
        "(where programs run)",
        "E2B",
        "",
        None,
        "a sandbox of this machine, or a server: task.sandbox.url",
        topic="verifier",
    ),
    Row("do_eval", "false", "eval.problems", 0, "none", topic="evaluation"),
    Row("num_generations", "14", "rollout.group_size", 14),
    Row("(prompts in a step)", "32", "rollout.num_prompts", 32, "16 * 7 GPUs * 4 / 14"),
    Row("max_prompt_length", "1024", "rollout.max_prompt_tokens", 1024),
    Row("max_completion_length", "2048", "rollout.max_new_tokens", 2048),
    Row("temperature", "1", "rollout.temperature", 1.0),
    Row("beta", "0.01", "algorithm.kl.coef", 0.01),
    Row("learning_rate", "5e-6", "optimizer.lr", 5e-6),
    Row("lr_scheduler_type", "cosine_with_min_lr", "optimizer.schedule", "cosine"),
    Row("min_lr_rate", "0.1", "optimizer.schedule.min_lr_ratio", 0.1),
    Row("warmup_ratio", "0.03", "optimizer.warmup.ratio", 0.03),
    Row("max_steps", "500", "train.steps", 500),
    *GRPO,
)

# The recipes of February 2025.

FEBRUARY = (
    *OF_BOTH_COMMITS,
    Row("(loss)", "a mean over a response's tokens", "algorithm.weight", "sequence_mean"),
    Row(
        "(ratio)",
        "1, without a clip",
        "algorithm.surrogate.high",
        0.2,
        "never reached: a step is one update",
    ),
    Row("(beta)", "0.04", "algorithm.kl.coef", 0.04),
    Row("(estimator of the KL)", "k3", "algorithm.kl.estimator", "k3"),
    Row(
        "(reward_funcs)",
        "accuracy, format",
        "task.reward.functions",
        ("accuracy", "open_r1_format_inline"),
        "format as of e4ac3ae",
        topic="rewards",
    ),
    Row("(reward weights)", "the sum", "task.reward.weights", (1.0, 1.0), topic="rewards"),
    Row(
        "(accuracy)",
        "math-verify on the first box or formula of the response",
        "task.verifier",
        "open_r1",
        "the function of e4ac3ae: a gold without LaTeX pays 1 to every response",
        topic="verifier",
    ),
    Row("do_eval, eval_steps", "100", "eval.every", 100, "also before the run", topic="evaluation"),
    Row(
        "(dataset_test_split)",
        "test, all rows",
        "eval.problems",
        10000,
        "at most: held out is the test split",
        topic="evaluation",
    ),
    Row("(greedy evaluation)", "none", "eval.greedy", False, topic="evaluation"),
    Row("(temperature)", "0.9", "rollout.temperature", 0.9),
    Row("max_prompt_length", "512", "rollout.max_prompt_tokens", 512),
    Row("max_completion_length", "1024", "rollout.max_new_tokens", 1024),
    Row("lr_scheduler_type", "cosine", "optimizer.schedule", "cosine"),
    Row("(last rate)", "0", "optimizer.schedule.min_lr_ratio", 0.0),
    Row("warmup_ratio", "0.1", "optimizer.warmup.ratio", 0.1),
    Row("max_steps", "-1: one pass", "train.prompt_epochs", 1.0, "one pass"),
)

NUMINA = (
    Row("dataset_name", "AI-MO/NuminaMath-TIR", "task.data", "AI-MO/NuminaMath-TIR"),
    Row("(gold)", "the column solution", "task.data.answer", "solution"),
    Row("num_generations", "2", "rollout.group_size", 2),
    Row("(prompts in a step)", "112", "rollout.num_prompts", 112, "2 * 7 GPUs * 16 / 2"),
    Row("(samples of an evaluation)", "2", "eval.samples", 2, "num_generations"),
    Row("learning_rate", "2e-5", "optimizer.lr", 2e-5),
    *FEBRUARY,
)

CHAT_TEMPLATE = Row(
    "(chat_template)", "the model's", "task.template", "chat", "the model's", topic="prompt"
)
NUMINA_INSTRUCT = (
    Row(
        "model_name_or_path",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "model.path",
        "Qwen/Qwen2.5-1.5B-Instruct",
    ),
    CHAT_TEMPLATE,
    *NUMINA,
)
NUMINA_DISTILLED = (
    Row(
        "model_name_or_path",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
        "model.path",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    ),
    differing(
        "(chat_template)",
        "the model's of February 2025",
        "task.template",
        "r1_distill_tags",
        "its text around the question; the model's of today begins the thoughts in the prompt",
        topic="prompt",
    ),
    *NUMINA,
)
SIMPLE_RL = (
    Row("model_name_or_path", "Qwen/Qwen2.5-Math-7B", "model.path", "Qwen/Qwen2.5-Math-7B"),
    CHAT_TEMPLATE,
    Row(
        "dataset_name",
        "DigitalLearningGmbH/MATH-lighteval",
        "task.data",
        "DigitalLearningGmbH/MATH-lighteval",
    ),
    Row("(gold)", "the column solution", "task.data.answer", "solution"),
    Row("num_generations", "7", "rollout.group_size", 7),
    Row("(prompts in a step)", "16", "rollout.num_prompts", 16, "2 * 7 GPUs * 8 / 7"),
    Row("(samples of an evaluation)", "7", "eval.samples", 7, "num_generations"),
    Row("learning_rate", "3e-6", "optimizer.lr", 3e-6),
    *FEBRUARY,
)

# TRL's SFTTrainer.

SFT = (
    Row(
        "model_name_or_path",
        "open-r1/Qwen2.5-Math-7B-RoPE-300k",
        "model.path",
        "open-r1/Qwen2.5-Math-7B-RoPE-300k",
    ),
    Row(
        "dataset_name, dataset_config",
        "open-r1/Mixture-of-Thoughts, all",
        "sft.data",
        "all@open-r1/Mixture-of-Thoughts",
        "config@id",
    ),
    differing(
        "chat_template",
        "Qwen's with a system prompt of open-r1 about thoughts and solution",
        "sft.chat_template",
        "",
        "the model's own: give the published one as a file",
        topic="prompt",
    ),
    Row("(system prompt)", "the template's", "sft.system_prompt", "", "none besides that"),
    Row("eos_token", "<\\|im_end\\|>", "", None, "the token that ends a turn"),
    Row("(loss)", "on all tokens", "sft.loss", "all"),
    differing(
        "(mean of the loss)",
        "over the tokens of a GPU, then over 8 GPUs",
        "",
        None,
        "over the tokens of the step",
    ),
    Row("max_length", "32768", "sft.pack_length", 32768),
    Row("(longer examples)", "cut off", "sft.long_examples", "cut"),
    Row("packing", "false", "", None, "packed, and examples do not see each other"),
    Row("(examples in a step)", "128", "sft.batch_size", 128, "2 * 8 GPUs * 8"),
    Row("num_train_epochs", "5", "sft.epochs", 5.0),
    Row("learning_rate", "4.0e-5", "optimizer.lr", 4e-5),
    Row("lr_scheduler_type", "cosine_with_min_lr", "optimizer.schedule", "cosine"),
    Row("min_lr_rate", "0.1", "optimizer.schedule.min_lr_ratio", 0.1),
    Row("warmup_ratio", "0.03", "optimizer.warmup.ratio", 0.03),
    Row("(first rate of the warm-up)", "0", "optimizer.warmup.from_zero", True),
    Row("max_grad_norm", "0.2", "optimizer.clip_norm", 0.2),
    Row("(AdamW, first beta)", "0.9", "optimizer.b1", 0.9),
    Row("(AdamW, second beta)", "0.999", "optimizer.b2", 0.999),
    Row("(AdamW, epsilon)", "1e-8", "optimizer.eps", 1e-8),
    Row("(weight_decay)", "0", "optimizer.weight_decay", 0.0),
    Row("seed", "42", "train.seed", 42),
    Row("do_eval", "false", "eval.suites", (), topic="evaluation"),
    differing(
        "(evaluation of the published figures)",
        "lighteval, temperature 0.6, top_p 0.95, 32,768 tokens",
        "",
        None,
        "jzero evaluate, with these settings in its command",
        topic="evaluation",
    ),
)

GRPO_RECIPES = "huggingface/open-r1, recipes/{}/grpo/{}.yaml"
GRPO_OF_FEBRUARY = "huggingface/open-r1 at e4ac3ae, recipes/{}/grpo/{}.yaml"
OPEN_R1_RUNS = (
    PublishedRun(
        "open-r1, GRPO of Qwen2.5-1.5B-Instruct",
        GRPO_RECIPES.format("Qwen2.5-1.5B-Instruct", "config_demo"),
        "open_r1",
        "qwen2.5-1.5b-instruct",
        "open_r1",
        INSTRUCT,
    ),
    PublishedRun(
        "open-r1, GRPO of DeepSeek-R1-Distill-Qwen-1.5B",
        GRPO_RECIPES.format("DeepSeek-R1-Distill-Qwen-1.5B", "config_demo"),
        "open_r1",
        "r1-distill-qwen-1.5b",
        "open_r1_distilled",
        DISTILLED,
    ),
    PublishedRun(
        "open-r1, GRPO on programs",
        GRPO_RECIPES.format("Qwen2.5-1.5B-Instruct", "config_demo_code"),
        "code",
        "qwen2.5-1.5b-instruct",
        "open_r1_code",
        CODE,
    ),
    PublishedRun(
        "open-r1 of February 2025, GRPO of Qwen2.5-1.5B-Instruct",
        GRPO_OF_FEBRUARY.format("Qwen2.5-1.5B-Instruct", "config_demo"),
        "open_r1",
        "numina-qwen2.5-1.5b-instruct",
        "open_r1_february",
        NUMINA_INSTRUCT,
    ),
    PublishedRun(
        "open-r1 of February 2025, GRPO of DeepSeek-R1-Distill-Qwen-7B",
        GRPO_OF_FEBRUARY.format("DeepSeek-R1-Distill-Qwen-7B", "config_demo"),
        "open_r1",
        "numina-r1-distill-qwen-7b",
        "",
        NUMINA_DISTILLED,
    ),
    PublishedRun(
        "open-r1 of February 2025, Simple RL of Qwen2.5-Math-7B",
        GRPO_OF_FEBRUARY.format("Qwen2.5-Math-7B", "config_simple_rl"),
        "open_r1",
        "simple-rl-qwen2.5-math-7b",
        "open_r1_february",
        SIMPLE_RL,
    ),
    PublishedRun(
        "OpenR1-Distill-7B, supervised",
        "huggingface/open-r1, recipes/OpenR1-Distill-7B/sft/config_distill.yaml",
        "sft",
        "openr1-distill-7b",
        "open_r1_sft",
        SFT,
        topics=("prompt", "evaluation"),
    ),
)
