"""A run of RL with a hybrid of attention and gated delta nets, and what serves its export."""

import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from runs import read_jsonl
from servers import load_alone, threaded_server
from test_train import tiny_run

from jzero import algorithms
from jzero.config import RewardConfig, tiny_arch
from jzero.decoder.scoring import Scoring, score_all
from jzero.loops import rl
from jzero.model.tokenizer import encode
from jzero.serving.limits import Limits

ENTRIES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ARCH = tiny_arch("tiny-qwen3.5", **ENTRIES)
WITH_EXPERTS = tiny_arch(
    "tiny-qwen3.5-moe",
    **ENTRIES,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    shared_expert_intermediate_size=16,
)


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize(
    "arch", [pytest.param(ARCH, id="dense"), pytest.param(WITH_EXPERTS, id="experts")]
)
def test_a_hybrid_is_trained_exported_and_served(arch: str, tmp_path: Path) -> None:
    config = tiny_run(3, algorithms.PRESETS["grpo"]())
    config.model.arch = arch
    config.rollout.kv_dtype = "float32"
    # The lengths of responses differ, so that every step has something to train on.
    config.task.reward = RewardConfig(functions=("accuracy", "length"))
    # Pages for 6 of 10 that the two slots of a device may ask for: some sequences are preempted.
    config.rollout.num_pages = 8 * 6
    rl.train(config, tmp_path)

    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "policy/mismatch" in row]
    assert len(rows) == 3
    # Sampler and trainer compute the same function, before and after the weights were published.
    assert all(row["policy/mismatch"] < 1e-5 for row in rows)
    assert all(0 < row["optimizer/grad_norm"] < np.inf for row in rows)

    [export] = tmp_path.glob("export-*")
    alone = load_alone(str(export))
    prompt = "1 2=3"
    by_scheduler = alone.complete(prompt, 8)
    tokens = by_scheduler.tokens.ids
    num_prompt = len(encode(alone.tokenizer, prompt))
    scoring = Scoring(tokens, first=num_prompt)
    score_all(alone.engine, alone.params, [scoring])
    np.testing.assert_allclose(scoring.scores.logps, by_scheduler.new_logps, atol=1e-5)

    limits = Limits()
    server = alone.new_server(limits)
    arguments = alone.params, alone.key
    threading.Thread(target=server.worker.serve, args=arguments, daemon=True).start()
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0.0, "logprobs": 1}
    with threaded_server(server, limits) as running:
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    logprobs = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(logprobs, by_scheduler.new_logps, atol=1e-4)
