"""Tiny values to test on, and slow definitions to compare with: Python loops, and the model over one sequence a row, in
float64. Shared by the tests of algorithms, batch, update, sharding, sft and train."""

import math
import statistics
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jzero import config
from jzero.model import qwen
from jzero.types import Grade, Problem, Rollout

VOCAB = 61
MODEL = qwen.QwenConfig("qwen2", VOCAB, 16, 24, 2, 4, 2, 8, True, 10000.0, 1e-6)


def settings(**sections) -> config.Config:
    """A config of float32 and tiny shapes; settings(train={"tokens": 64}) changes fields."""
    values = config.Config()
    defaults = {
        "model": {"dtype": "float32", "remat": "none", "logit_chunk": 10**6},
        "rollout": {"prompts": 4, "group": 4, "max_prompt": 6, "max_new": 12, "temperature": 0.7},
        "train": {"tokens": 128, "buckets": 1, "row_slots": 2},
        "mesh": {"data": -1, "fsdp": 1},
    }
    for name, fields in list(defaults.items()) + list(sections.items()):
        for field, value in fields.items():
            assert hasattr(getattr(values, name), field), field
            setattr(getattr(values, name), field, value)
    config.validate(values)
    return values


def random_params(model: qwen.QwenConfig = MODEL, scale: float = 0.15) -> qwen.Params:
    """Every leaf random, norms around 1: far from uniform predictions, so that everything matters."""
    rng = np.random.default_rng(0)

    def leaf(path, x):
        around = 1.0 if "norm" in path[-1].key else 0.0
        return jnp.asarray(around + scale * rng.standard_normal(x.shape), jnp.float32)

    return jax.tree.map_with_path(leaf, qwen.abstract(model))


def placed(policy, params: qwen.Params) -> qwen.Params:
    """A copy where the policy wants it: what it is given it may donate."""
    return jax.tree.map(lambda x, s: jax.device_put(np.asarray(x), s), params, policy.shardings)


def random_rollouts(seed: int, prompts: int, group: int, max_prompt: int = 6, max_new: int = 12) -> list[Rollout]:
    """Ragged rollouts. Some responses hold tokens of an environment (sampled=False), some are cut at max_new, the first
    group scores 0.1 throughout, and log-probs are near what a policy might have given."""
    rng = np.random.default_rng(seed)
    out = []
    for p in range(prompts):
        head = rng.integers(0, VOCAB, rng.integers(1, max_prompt + 1))
        for g in range(group):
            new = int(rng.integers(1, (max_new if p < prompts - 1 else max_new // 2) + 1))  # the last group: short
            finish = "length" if new == max_new else "stop"
            sampled = np.arange(len(head) + new) >= len(head)
            if g % 2:  # the environment speaks, never first: that would lengthen the prompt
                sampled[len(head) + 1 :] &= rng.random(new - 1) < 0.6
            tokens = np.concatenate([head, rng.integers(0, VOCAB, new)]).astype(np.int32)
            score = 0.1 if p == 0 else float(rng.choice([0.0, 0.1, 1.0]))
            rollout = Rollout(
                problem=Problem(f"slow/{p}", "countdown", "", {}),
                sample=g,
                tokens=tokens,
                sampled=sampled,
                logps=np.where(sampled, rng.normal(-4, 0.3, len(tokens)), 0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                text="",
                finish=finish,
                grade=Grade(score, score == 1.0, ""),
            )
            out.append(rollout)
    return out


# -- algorithms ----------------------------------------------------------------------------------------------------


def advantages(scores: list[float], kind: str, eps: float) -> list[float]:
    """Of one group."""
    if len(set(scores)) == 1:
        return [0.0] * len(scores)
    mean = statistics.fmean(scores)
    scale = {"group_mean": 1.0, "group_mean_std": statistics.stdev(scores) + eps}[kind]
    return [(score - mean) / scale for score in scores]


def token_weights(rollouts: list[Rollout], algorithm, max_new: int) -> list[list[float]]:
    """Of every token of every rollout, 0 where it is not trained."""
    trained = [
        [s and not (algorithm.truncated == "mask" and rollout.finish == "length") for s in rollout.sampled.tolist()]
        for rollout in rollouts
    ]
    out = []
    for mine in trained:
        share = {
            "sequence_mean": lambda mine: 1 / len(rollouts) / sum(mine),
            "token_mean": lambda _: 1 / sum(map(sum, trained)),
            "constant": lambda _: 1 / len(rollouts) / max_new,
        }[algorithm.weight]
        out.append([share(mine) if token else 0.0 for token in mine])
    return out


def token_loss(logp: float, old: float, ref: float, advantage: float, algorithm) -> tuple[float, float]:
    """Clipped surrogate and KL of one token, and its derivative by logp."""
    ratio = math.exp(logp - old)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    clipped = min(max(ratio, low), high)
    cut = clipped * advantage < ratio * advantage
    loss = -(clipped if cut else ratio) * advantage
    slope = 0.0 if cut else -ratio * advantage
    d = ref - logp
    return (
        loss + algorithm.kl_coef * (math.exp(d) - d - 1),
        slope + algorithm.kl_coef * (1 - math.exp(d)),
    )


def policy_loss(rollouts, logps, old, ref, algorithm, group: int, max_new: int) -> tuple[float, list[np.ndarray]]:
    """The loss of one optimizer step and its derivative by the log-prob of every token of every rollout; logps, old
    and ref hold one array a rollout, as long as its tokens."""
    zero = algorithm.truncated == "zero"
    scores = [0.0 if zero and r.finish == "length" else float(np.float32(r.grade.score)) for r in rollouts]
    share = [
        advantage
        for at in range(0, len(rollouts), group)
        for advantage in advantages(scores[at : at + group], algorithm.advantage, algorithm.std_eps)
    ]
    weights = token_weights(rollouts, algorithm, max_new)
    total, slopes = 0.0, []
    for i, rollout in enumerate(rollouts):
        slope = np.zeros(len(rollout.tokens))
        for t in range(len(rollout.tokens)):
            if weights[i][t]:
                at = float(logps[i][t]), float(old[i][t]), float(ref[i][t])
                loss, derivative = token_loss(*at, share[i], algorithm)
                total += weights[i][t] * loss
                slope[t] = weights[i][t] * derivative
        slopes.append(slope)
    return total, slopes


# -- the model -----------------------------------------------------------------------------------------------------


def forward(model: qwen.QwenConfig, params, tokens):
    """Qwen2 again, one sequence a row: tokens i32[N, T] -> logits [N, T, V], in the params' own precision."""
    T, half = tokens.shape[1], model.head_dim // 2
    angles = np.arange(T)[:, None] * model.rope_theta ** (-np.arange(half) / half)
    norm = lambda x, scale: x / jnp.sqrt((x * x).mean(-1, keepdims=True) + model.rms_norm_eps) * scale

    def rotate(x):  # [N, H, T, D]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)

    x = params["embed"][tokens]
    for i in range(model.num_hidden_layers):
        p = {name: leaf[i] for name, leaf in params["layers"].items()}
        h = norm(x, p["attn_norm"])
        heads = lambda name, h=h, p=p: jnp.einsum("nte,ehd->nhtd", h, p[name]) + p[f"{name}_bias"][:, None]
        spread = lambda x: jnp.repeat(x, model.num_attention_heads // model.num_key_value_heads, axis=1)
        q, k, v = rotate(heads("q")), spread(rotate(heads("k"))), spread(heads("v"))
        scores = jnp.where(np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / math.sqrt(model.head_dim), -jnp.inf)
        x = x + jnp.einsum("nhtd,hde->nte", jax.nn.softmax(scores) @ v, p["o"])
        h = norm(x, p["mlp_norm"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return norm(x, params["norm"]) @ params["embed"].T


@partial(jax.jit, static_argnums=0)
def rows_logps(model: qwen.QwenConfig, params, tokens, temperature):
    """tokens i32[N, T], one sequence a row, padded at the end -> log-prob of every token but the first, and the entropy
    of what it was drawn from, [N, T] (0 for the first)."""
    logps = jax.nn.log_softmax(forward(model, params, tokens)[:, :-1] / temperature)
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
    entropy = -(jnp.exp(logps) * logps).sum(-1)
    return jnp.pad(chosen, ((0, 0), (1, 0))), jnp.pad(entropy, ((0, 0), (1, 0)))


def padded(arrays) -> np.ndarray:
    """Rows of few widths: each compiles anew."""
    width = -(-max(map(len, arrays)) // 18) * 18
    return np.stack([np.pad(x, (0, width - len(x))) for x in arrays])


def doubles(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def naive(params, rollouts, temperature: float, model: qwen.QwenConfig = MODEL) -> tuple[list, list]:
    """Log-prob, and entropy before it, of every token of every rollout, f64."""
    with jax.enable_x64(True):
        values = rows_logps(model, doubles(params), padded([r.tokens for r in rollouts]), temperature)
    cut = lambda x: [row[: len(r.tokens)] for row, r in zip(np.asarray(x), rollouts, strict=True)]
    return cut(values[0]), cut(values[1])


def naive_gradient(params, rollouts, slopes, temperature: float, model: qwen.QwenConfig = MODEL) -> qwen.Params:
    """sum_t slope_t grad logp_t, over every token of every rollout, f64."""
    tokens = padded([r.tokens for r in rollouts])
    with jax.enable_x64(True):
        return jax.device_get(gradient_of_logps(model, doubles(params), tokens, padded(slopes), temperature))


@partial(jax.jit, static_argnums=0)
def gradient_of_logps(model, params, tokens, slopes, temperature):
    return jax.grad(lambda p: (rows_logps(model, p, tokens, temperature)[0] * slopes).sum())(params)


def adamw(params, gradients, settings, rates):
    """One step a gradient function, in float64; gradients(params) -> tree."""
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda x: np.asarray(x, np.float64), params))
    names = [path[-1].key for path, _ in jax.tree.leaves_with_path(params)]
    m, v = [0.0] * len(leaves), [0.0] * len(leaves)
    for t, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        g = jax.tree.leaves(gradient(jax.tree.unflatten(tree, leaves)))
        norm = np.sqrt(sum((x**2).sum() for x in g))
        g = [x * min(1.0, settings.clip_norm / norm) for x in g]
        for i, name in enumerate(names):
            m[i] = settings.b1 * m[i] + (1 - settings.b1) * g[i]
            v[i] = settings.b2 * v[i] + (1 - settings.b2) * g[i] ** 2
            step = m[i] / (1 - settings.b1**t) / (np.sqrt(v[i] / (1 - settings.b2**t)) + settings.eps)
            decay = 0.0 if "norm" in name or "bias" in name else settings.weight_decay
            leaves[i] = leaves[i] - rate * (step + decay * leaves[i])
    return jax.tree.unflatten(tree, leaves)


def difference(got, want) -> float:
    """The largest relative norm of the difference of two leaves, over a tree."""
    one = lambda a, b: float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))
    return max(jax.tree.leaves(jax.tree.map(one, got, want)))
