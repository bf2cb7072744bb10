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
from jzero.types import Grade, Problem, Rollout, Turn

VOCAB = 61
MODEL = qwen.QwenConfig("qwen2", VOCAB, 16, 24, 2, 4, 2, 8, True, 10000.0, 1e-6)


def settings(**sections) -> config.Config:
    """A config of float32 and tiny shapes; settings(train={"tokens": 64}) changes fields."""
    values = config.Config()
    defaults = {
        "model": {"dtype": "float32", "remat": "none", "logit_chunk": 10**6},
        "rollout": {
            "num_prompts": 4,
            "group_size": 4,
            "max_prompt_tokens": 6,
            "max_new_tokens": 12,
            "temperature": 0.7,
        },
        "train": {"microbatch_tokens": 128, "pack_buckets": 1, "packs_per_row": 2},
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


def random_rollouts(
    seed: int, prompts: int, group: int, max_prompt: int = 6, max_new: int = 12
) -> list[Rollout]:
    """Ragged rollouts. Some responses hold tokens of an environment (sampled=False), some are cut at max_new, the first
    group scores 0.1 throughout, and log-probs are near what a policy might have given."""
    rng = np.random.default_rng(seed)
    out = []
    for p in range(prompts):
        head = rng.integers(0, VOCAB, rng.integers(1, max_prompt + 1))
        for g in range(group):
            new = int(
                rng.integers(1, (max_new if p < prompts - 1 else max_new // 2) + 1)
            )  # the last group: short
            finish = "length" if new == max_new else "stop"
            sampled = np.arange(len(head) + new) >= len(head)
            if g % 2:  # the environment speaks, never first: that would lengthen the prompt
                sampled[len(head) + 1 :] &= rng.random(new - 1) < 0.6
            tokens = np.concatenate([head, rng.integers(0, VOCAB, new)]).astype(np.int32)
            score = 0.1 if p == 0 else float(rng.choice([0.0, 0.1, 1.0]))
            grade = Grade(score, score == 1.0, "")
            rollout = Rollout(
                problem=Problem(f"slow/{p}", "countdown", "", {}),
                sample_index=g,
                tokens=tokens,
                sampled=sampled,
                logps=np.where(sampled, rng.normal(-4, 0.3, len(tokens)), 0).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                turns=(Turn(len(head), len(tokens), "", finish, grade),),
                grade=grade,
            )
            out.append(rollout)
    return out


# -- algorithms ----------------------------------------------------------------------------------------------------
# One token at a time, from the papers' formulas; of jzero.algorithms it reads nothing but an Algorithm's fields.


def score(rollout: Rollout, algorithm, max_new: int) -> float:
    cut = rollout.finish_reason == "length"
    value = (
        algorithm.truncated_score if cut and algorithm.truncated == "fixed" else rollout.grade.score
    )
    if cut:
        value -= algorithm.truncated_penalty
    buffer = algorithm.overlong_share * max_new  # DAPO eq. 13: L_cache
    length = sum(rollout.sampled.tolist())
    if buffer and length > max_new:
        value -= 1.0
    elif buffer and length > max_new - buffer:
        value += ((max_new - buffer) - length) / buffer
    return value


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), V = 0 after the last token."""
    out = []
    for t in range(len(rewards)):
        total = 0.0
        for s in range(t, len(rewards)):
            after = values[s + 1] if s + 1 < len(rewards) else 0.0
            total += (gamma * lam) ** (s - t) * (rewards[s] + gamma * after - values[s])
        out.append(total)
    return out


def group_advantage(returns: list[float], i: int, group: list[int], algorithm) -> float:
    """Of rollout i."""
    peers = [returns[j] for j in range(len(returns)) if group[j] == group[i]]
    if len(set(peers)) == 1:
        return 0.0
    centred = returns[i] - statistics.fmean(peers)
    if algorithm.advantage == "leave_one_out":
        others = [returns[j] for j in range(len(returns)) if group[j] == group[i] and j != i]
        return returns[i] - statistics.fmean(others)
    return {
        "group_mean": lambda: centred,
        "group_mean_std": lambda: centred / (statistics.stdev(peers) + algorithm.std_eps),
        "group_mean_batch_std": lambda: centred / (statistics.stdev(returns) + algorithm.std_eps),
    }[algorithm.advantage]()


def advantages(
    rewards, values, group: list[int], algorithm
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and the critic's targets of every sampled token of every rollout; rewards and values are of those,
    group holds a number a rollout."""
    out = []
    for i, mine in enumerate(rewards):
        if algorithm.advantage == "return_to_go":
            n = len(mine)
            out.append(
                [
                    math.fsum(algorithm.gamma ** (s - t) * mine[s] for s in range(t, n))
                    for t in range(n)
                ]
            )
        elif algorithm.advantage == "gae":
            out.append(gae(mine, values[i], algorithm.gamma, algorithm.lam))
        else:
            returns = [math.fsum(each) for each in rewards]
            out.append([group_advantage(returns, i, group, algorithm)] * len(mine))
    targets = [
        [a + v for a, v in zip(*pair, strict=True)] for pair in zip(out, values, strict=True)
    ]
    if algorithm.whiten:
        every = [a for mine in out for a in mine]
        mean, scale = statistics.fmean(every), math.sqrt(statistics.variance(every) + 1e-8)
        out = [[(a - mean) / scale for a in mine] for mine in out]
    return out, targets


def advantages_of(rollouts, old, ref, algorithm, group: int, max_new: int, values=None):
    """`advantages` of rollouts, over all their tokens: 0 where not sampled. The k1 of every token is taken from its
    reward, the score comes with the last."""
    values = values or [np.zeros(len(r.tokens)) for r in rollouts]
    rewards, kept = [], []
    for i, rollout in enumerate(rollouts):
        places = [t for t in range(len(rollout.tokens)) if rollout.sampled[t]]
        rewards.append(
            [-algorithm.kl_reward * (float(old[i][t]) - float(ref[i][t])) for t in places]
        )
        rewards[i][-1] += score(rollout, algorithm, max_new)
        kept.append([float(values[i][t]) for t in places])
    result = []
    for each in advantages(rewards, kept, [i // group for i in range(len(rollouts))], algorithm):
        spread = [np.zeros(len(r.tokens)) for r in rollouts]
        for mine, row, rollout in zip(spread, each, rollouts, strict=True):
            mine[rollout.sampled] = row
        result.append(spread)
    return result


def token_weights(
    rollouts, algorithm, max_new: int, chosen=None, name: str = ""
) -> list[list[float]]:
    """Of every token of every rollout in the optimizer step of the chosen ones: 0 where it is not trained."""
    chosen = range(len(rollouts)) if chosen is None else chosen
    trained = [
        [
            s and not (algorithm.truncated == "mask" and rollout.finish_reason == "length")
            for s in rollout.sampled.tolist()
        ]
        for rollout in rollouts
    ]
    counts = [sum(mine) for mine in trained]
    share = {
        "sequence_mean": lambda i: 1 / len(chosen) / counts[i],
        "sequence_sum": lambda i: 1 / len(chosen),
        "token_mean": lambda i: 1 / sum(counts[j] for j in chosen),
        "batch_token_mean": lambda i: 1 / sum(counts),
        "constant": lambda i: 1 / len(chosen) / (algorithm.length_norm or max_new),
    }[name or algorithm.weight]
    out = []
    for i, mine in enumerate(trained):
        weight = share(i) if counts[i] and i in chosen else 0.0
        out.append([weight if token else 0.0 for token in mine])
    return out


def surrogate(ratio: float, logp: float, A: float, algorithm) -> tuple[float, float, float]:
    """A token's loss, its derivative by the ratio, and the one by logp that does not go through the ratio."""
    clipped = min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high)
    if algorithm.surrogate == "reinforce":
        return -A * logp, 0.0, -A
    if algorithm.surrogate == "cispo":
        return -clipped * A * logp, 0.0, -clipped * A
    if algorithm.dual_clip and A < 0 and ratio > algorithm.dual_clip:
        return -algorithm.dual_clip * A, 0.0, 0.0
    if clipped * A < ratio * A:
        return -clipped * A, 0.0, 0.0
    return -ratio * A, -A, 0.0


def correction(gaps: list[float], t: int, algorithm) -> float:
    """Of the t-th trained token of a sequence; gaps are their log pi_old - log pi_sampler."""
    low, high, name = algorithm.correction_low, algorithm.correction_high, algorithm.correction
    if name == "":
        return 1.0
    if name == "geometric":
        return float(low <= math.exp(statistics.fmean(gaps)) <= high)
    ratio = (
        math.prod(math.exp(gap) for gap in gaps)
        if name.startswith("sequence")
        else math.exp(gaps[t])
    )
    if name.endswith("truncate"):
        return min(ratio, high)
    return ratio if low <= ratio <= high else 0.0


def kl(logp: float, ref: float, algorithm) -> tuple[float, float]:
    """A token's KL to the reference policy, and its derivative by logp."""
    d = ref - logp
    value, slope = {"k2": (d * d / 2, -d), "k3": (math.exp(d) - d - 1, 1 - math.exp(d))}[
        algorithm.kl_estimator
    ]
    return (
        (algorithm.kl_max, 0.0) if algorithm.kl_max and value > algorithm.kl_max else (value, slope)
    )


def sequence_loss(
    w, v, logps, old, ref, sampler, entropy, A, algorithm
) -> tuple[float, list[float]]:
    """Loss of one sequence's trained tokens, and its derivative by their log-probs, each a list over them."""
    n = len(w)
    shifts = [logps[t] - old[t] for t in range(n)]
    gaps = [old[t] - sampler[t] for t in range(n)]
    total, slopes = 0.0, [0.0] * n
    for t in range(n):
        together = algorithm.ratio == "sequence"
        ratio = math.exp(sum(shifts) / n if together else shifts[t])
        term, by_ratio, direct = surrogate(ratio, logps[t], A[t], algorithm)
        c, (divergence, by_logp) = correction(gaps, t, algorithm), kl(logps[t], ref[t], algorithm)
        total += (
            w[t] * (c * term - algorithm.entropy_coef * entropy[t])
            + v[t] * algorithm.kl_coef * divergence
        )
        slopes[t] += w[t] * c * direct + v[t] * algorithm.kl_coef * by_logp
        for s in range(n) if together else [t]:
            slopes[s] += w[t] * c * by_ratio * ratio / (n if together else 1)
    return total, slopes


def policy_loss(
    rollouts,
    logps,
    old,
    ref,
    algorithm,
    group: int,
    max_new: int,
    chosen=None,
    sampler=None,
    entropy=None,
    values=None,
) -> tuple[float, list[np.ndarray]]:
    """The loss of the optimizer step of the chosen rollouts (all), among those of an RL step, and its derivative by the
    log-prob of every token; logps, old, ref and so on hold one array a rollout, as long as its tokens."""
    zeros = [np.zeros(len(r.tokens)) for r in rollouts]
    sampler, entropy = sampler or [r.logps for r in rollouts], entropy or zeros
    old = sampler if algorithm.old_policy == "sampler" else old
    A, _ = advantages_of(rollouts, old, ref, algorithm, group, max_new, values)
    weights = token_weights(rollouts, algorithm, max_new, chosen)
    kl_weights = token_weights(rollouts, algorithm, max_new, chosen, algorithm.kl_weight)
    total, slopes = 0.0, zeros
    for i, rollout in enumerate(rollouts):
        places = [t for t in range(len(rollout.tokens)) if weights[i][t]]
        arrays = (x[i] for x in (weights, kl_weights, logps, old, ref, sampler, entropy, A))
        loss, mine = sequence_loss(*([float(x[t]) for t in places] for x in arrays), algorithm)
        total += loss
        slopes[i] = np.zeros(len(rollout.tokens))
        slopes[i][places] = mine
    return total, slopes


def value_loss(value: float, old: float, target: float, algorithm) -> tuple[float, float]:
    """Of one token, and its derivative by the value."""
    bound = (
        min(max(value, old - algorithm.value_clip), old + algorithm.value_clip)
        if algorithm.value_clip
        else value
    )
    half = 0.5 * algorithm.value_coef
    if (bound - target) ** 2 > (value - target) ** 2:
        return half * (bound - target) ** 2, 0.0
    return half * (value - target) ** 2, 2 * half * (value - target)


# -- the model -----------------------------------------------------------------------------------------------------


def hidden(model: qwen.QwenConfig, params, tokens):
    """Qwen2 again, one sequence a row: tokens i32[N, T] -> [N, T, E] after the final norm, in the params' precision."""
    T, half = tokens.shape[1], model.head_dim // 2
    angles = np.arange(T)[:, None] * model.rope_theta ** (-np.arange(half) / half)
    norm = lambda x, scale: (
        x / jnp.sqrt((x * x).mean(-1, keepdims=True) + model.rms_norm_eps) * scale
    )

    def rotate(x):  # [N, H, T, D]
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )

    x = params["embed"][tokens]
    for i in range(model.num_hidden_layers):
        p = {name: leaf[i] for name, leaf in params["layers"].items()}
        h = norm(x, p["attn_norm"])
        heads = lambda name, h=h, p=p: (
            jnp.einsum("nte,ehd->nhtd", h, p[name]) + p[f"{name}_bias"][:, None]
        )
        spread = lambda x: jnp.repeat(
            x, model.num_attention_heads // model.num_key_value_heads, axis=1
        )
        q, k, v = rotate(heads("q")), spread(rotate(heads("k"))), spread(heads("v"))
        scores = jnp.where(
            np.tri(T, dtype=bool), q @ k.swapaxes(2, 3) / math.sqrt(model.head_dim), -jnp.inf
        )
        x = x + jnp.einsum("nhtd,hde->nte", jax.nn.softmax(scores) @ v, p["o"])
        h = norm(x, p["mlp_norm"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return norm(x, params["norm"])


def forward(model: qwen.QwenConfig, params, tokens):
    """-> logits [N, T, V]"""
    return hidden(model, params, tokens) @ params["embed"].T


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


def naive(
    params, rollouts, temperature: float, model: qwen.QwenConfig = MODEL
) -> tuple[list, list]:
    """Log-prob, and entropy before it, of every token of every rollout, f64."""
    with jax.enable_x64(True):
        values = rows_logps(
            model, doubles(params), padded([r.tokens for r in rollouts]), temperature
        )
    cut = lambda x: [row[: len(r.tokens)] for row, r in zip(np.asarray(x), rollouts, strict=True)]
    return cut(values[0]), cut(values[1])


def naive_gradient(
    params, rollouts, slopes, temperature: float, model: qwen.QwenConfig = MODEL
) -> qwen.Params:
    """sum_t slope_t grad logp_t, over every token of every rollout, f64."""
    tokens = padded([r.tokens for r in rollouts])
    with jax.enable_x64(True):
        return jax.device_get(
            gradient_of_logps(model, doubles(params), tokens, padded(slopes), temperature)
        )


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
            step = (
                m[i] / (1 - settings.b1**t) / (np.sqrt(v[i] / (1 - settings.b2**t)) + settings.eps)
            )
            decay = 0.0 if "norm" in name or "bias" in name else settings.weight_decay
            leaves[i] = leaves[i] - rate * (step + decay * leaves[i])
    return jax.tree.unflatten(tree, leaves)


def difference(got, want) -> float:
    """The largest relative norm of the difference of two leaves, over a tree."""
    one = lambda a, b: float(
        np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
    )
    return max(jax.tree.leaves(jax.tree.map(one, got, want)))
