"""Episodes of several turns in training: the advantages of turns, and which tokens have a gradient.

How such episodes are sampled is tested in tests/rollout/test_turns.py.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
import reference
from episodes import make_untrained_sampler, tiny_settings

from jzero import algorithms, config
from jzero.algorithms import ADVANTAGES, Algorithm, Episodes
from jzero.distributed.mesh import train_mesh
from jzero.model import qwen
from jzero.training.credit import make_episodes, spread_over_tokens, training_sequences
from jzero.training.step import Minibatch, make_minibatches, score_and_credit
from jzero.training.trainer import make_trainer
from jzero.types import Batch, Grade, Problem, Rollout, Turn

# Programs that several tests build anew are compiled once.
pytestmark = pytest.mark.usefixtures("quick_runs")

TURN_DISCOUNT = 0.7

# -- advantages of turns ---------------------------------------------------------------------------


def random_turns(seed: int) -> Episodes:
    """Returns groups of 1 to 6 rollouts of up to 12 tokens, in several turns."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(5), [1, 2, 3, 4, 6]))
    mask = np.arange(12) < rng.integers(1, 13, len(group))[:, None]
    is_new_turn = np.pad(rng.random((len(group), 11)) < 0.3, ((0, 0), (1, 0)))
    turn = np.cumsum(is_new_turn, axis=1)
    last_turn = np.where(mask, turn, 0).max(axis=1, keepdims=True)
    return Episodes(
        rng.choice([0.0, 0.1, 1.0, -1.0], mask.shape) * mask,
        rng.normal(size=mask.shape) * mask,
        mask,
        group,
        np.minimum(turn, last_turn),
        turn_discount=TURN_DISCOUNT,
    )


def returns_of_turns(episodes: Episodes) -> dict[tuple[int, int], float]:
    """Returns G_t = r_t + 0.7 G_{t+1} of every (rollout, turn), in loops."""
    returns: dict[tuple[int, int], float] = {}
    for i, num_tokens in enumerate(episodes.mask.sum(axis=1)):
        num_turns = int(episodes.turn[i, num_tokens - 1]) + 1
        for t in reversed(range(num_turns)):
            of_turn = [j for j in range(num_tokens) if episodes.turn[i, j] == t]
            reward = sum(episodes.rewards[i, j] for j in of_turn)
            returns[i, t] = reward + TURN_DISCOUNT * returns.get((i, t + 1), 0.0)
    return returns


def slow_group_advantages(episodes: Episodes, algorithm: Algorithm) -> dict[tuple[int, int], float]:
    """Returns the advantage of every (rollout, turn) among the group's turns of the same number."""
    returns = returns_of_turns(episodes)
    keys = sorted(returns)
    values = [returns[key] for key in keys]
    peer_groups = [(int(episodes.group[i]), t) for i, t in keys]
    numbers = {peers: number for number, peers in enumerate(sorted(set(peer_groups)))}
    group = [numbers[peers] for peers in peer_groups]
    advantages = {}
    for place, key in enumerate(keys):
        is_alone = group.count(group[place]) == 1
        advantages[key] = (
            0.0 if is_alone else reference.group_advantage(values, place, group, algorithm)
        )
    return advantages


def slow_token_advantages(
    episodes: Episodes, i: int, algorithm: Algorithm, num_tokens: int
) -> list[float]:
    """Returns the advantages of rollout i's tokens by return_to_go or gae, from the last token on.

    Between two turns gamma is multiplied by the discount of turns.
    """
    with_critic = algorithm.advantage == "gae"
    lam = algorithm.lam if with_critic else 1.0
    turns = episodes.turn[i, :num_tokens].tolist()
    advantages = []
    next_advantage = next_value = 0.0
    for j in reversed(range(num_tokens)):
        ends_turn = j + 1 < num_tokens and turns[j + 1] != turns[j]
        discount = algorithm.gamma * (TURN_DISCOUNT if ends_turn else 1.0)
        value = episodes.values[i, j] if with_critic else 0.0
        delta = episodes.rewards[i, j] + discount * next_value - value
        next_advantage = delta + discount * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_turns(name: str):
    """Against loops; peers are the group's turns of the same number."""
    algorithm = Algorithm(advantage=name, gamma=0.9, lam=0.8)
    for seed in range(4):
        episodes = random_turns(seed)
        assert episodes.turn.max() >= 3

        got, _ = algorithms.compute_advantages(episodes, algorithm)

        of_tokens = name in ("return_to_go", "gae")
        of_turns = {} if of_tokens else slow_group_advantages(episodes, algorithm)
        for i, num_tokens in enumerate(episodes.mask.sum(axis=1)):
            if of_tokens:
                want = slow_token_advantages(episodes, i, algorithm, num_tokens)
            else:
                want = [of_turns[i, int(t)] for t in episodes.turn[i, :num_tokens]]
            assert got[i, :num_tokens].tolist() == pytest.approx(want, abs=1e-9)
            assert not got[i, num_tokens:].any()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_one_turn_is_an_episode_without_turns(name: str):
    without_turns = random_turns(9)._replace(turn=None)
    one_turn = without_turns._replace(turn=np.zeros(without_turns.mask.shape, np.int64))
    algorithm = Algorithm(advantage=name)

    got, _ = algorithms.compute_advantages(one_turn, algorithm)

    want, _ = algorithms.compute_advantages(without_turns, algorithm)
    np.testing.assert_allclose(got, want, atol=1e-12)


# -- what is trained -------------------------------------------------------------------------------


def random_episode(
    rng: np.random.Generator, problem: Problem, prompt: np.ndarray, sample_index: int
) -> Rollout:
    """Returns one to three turns of 1 to 3 tokens, with replies of 1 or 2 tokens between them."""
    tokens = list(prompt)
    sampled = [False] * len(prompt)
    turns = []
    num_turns = int(rng.integers(1, 4))
    for t in range(num_turns):
        num_new = int(rng.integers(1, 4))
        num_reply = 0 if t == num_turns - 1 else int(rng.integers(1, 3))
        grade = Grade(float(rng.choice([-1.0, 0.5, 1.0])), False, "")
        finish_reason = "stop" if num_new < 3 else "length"
        turns.append(Turn(len(tokens), len(tokens) + num_new, "", finish_reason, grade))
        tokens += rng.integers(0, reference.VOCAB, num_new + num_reply).tolist()
        sampled += [True] * num_new + [False] * num_reply
    logps = np.where(sampled, rng.normal(-4, 0.3, len(tokens)), 0).astype(np.float32)
    return Rollout(
        problem=problem,
        sample_index=sample_index,
        tokens=np.array(tokens, np.int32),
        sampled=np.array(sampled),
        logps=logps,
        versions=np.where(sampled, 0, -1).astype(np.int32),
        turns=tuple(turns),
        grade=Grade(sum(turn.grade.score for turn in turns), False, ""),
    )


def random_groups(seed: int) -> list[Rollout]:
    """Returns four groups of four episodes."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for p in range(4):
        prompt = rng.integers(0, reference.VOCAB, rng.integers(1, 7))
        problem = Problem(f"slow/{p}", "guess", "", {})
        rollouts += [random_episode(rng, problem, prompt, g) for g in range(4)]
    return rollouts


# A step so long that the parameters before it are lost in rounding: what is left is the gradient.
FAR = 2.0**40


def gradient_of(
    rollouts: list[Rollout],
    change: Callable[[Batch], Batch] | None = None,
    weight: str = "token_mean",
    **train: object,
) -> tuple[qwen.Params, Minibatch]:
    """Returns RLOO's gradient and the minibatch, whose batches `change` may replace."""
    settings = reference.settings(
        rollout={"max_new_tokens": 3, "max_turns": 3, "max_reply_tokens": 2},
        task={"turn_discount": TURN_DISCOUNT},
        train={"microbatch_tokens": 256} | train,
        algorithm=vars(algorithms.PRESETS["rloo"](weight=weight)),
    )
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    trainer = make_trainer(settings, reference.MODEL, None, mesh)
    policy = trainer.policy
    policy.optimizer = optax.identity()
    [minibatch] = make_minibatches(trainer, rollouts, 1)
    score_and_credit(trainer, policy.abstract_state(), [minibatch], rollouts)
    batches = tuple(change(batch) if change else batch for batch in minibatch.batches)
    state = policy.start(reference.placed(policy, reference.random_params()))
    state, _ = policy.update(state, batches, minibatch.counts, trainer.layouts, FAR)
    gradient = jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params)
    return gradient, minibatch


def with_other_targets(batch: Batch, are_trained: bool) -> Batch:
    """Returns the batch with other targets in place of the trained, or of the untrained, ones."""
    targets = np.asarray(batch.targets)
    chosen = (np.asarray(batch.weights) != 0) == are_trained
    other = np.where(chosen, (targets + 1) % reference.VOCAB, targets)
    return replace(batch, targets=jax.device_put(other, batch.targets.sharding))


def test_replies_have_no_gradient():
    """Other targets in the place of replies change no bit of the gradient; elsewhere they do."""
    rollouts = random_groups(0)

    want, minibatch = gradient_of(rollouts)
    other_replies, _ = gradient_of(rollouts, lambda batch: with_other_targets(batch, False))
    other_responses, _ = gradient_of(rollouts, lambda batch: with_other_targets(batch, True))

    num_trained = sum(int((np.asarray(b.weights) != 0).sum()) for b in minibatch.batches)
    assert num_trained == sum(int(rollout.sampled.sum()) for rollout in rollouts)
    assert jax.tree.all(jax.tree.map(np.array_equal, other_replies, want))
    assert not jax.tree.all(jax.tree.map(np.array_equal, other_responses, want))


def test_a_sequence_for_each_turn_trains_the_same():
    """Where every token weighs the same; not where every sequence does."""
    rollouts = random_groups(1)
    want, by_episode = gradient_of(rollouts)
    for packs_per_row in (2, 0):
        got, by_turn = gradient_of(rollouts, sequence_per_turn=True, packs_per_row=packs_per_row)
        assert len(by_turn.chosen) == sum(len(rollout.turns) for rollout in rollouts)
        assert len(by_turn.chosen) > len(by_episode.chosen)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)

    by_episode, _ = gradient_of(rollouts, weight="sequence_mean", sequence_per_turn=False)
    by_turn, _ = gradient_of(rollouts, weight="sequence_mean", sequence_per_turn=True)
    assert not np.allclose(by_turn["embed"], by_episode["embed"])


def test_sequences_of_turns_are_those_of_areal():
    """realhf/impl/agent/math_multi_turn_agent.py, in a loop.

    A row is act.seqs, its prompt mask and the turn's reward; then rewards are discounted from the
    last turn back.
    """
    prompt, replies = [5, 6, 7], [[40, 41], [42], []]
    answers, success = [[11, 12], [13], [14, 15]], [False, False, True]
    bias, scaling, discount = 0.1, 5.0, 0.9

    # The agent's loop.
    token_ids = list(prompt)
    rows = []
    for answer, reply, is_right in zip(answers, replies, success, strict=True):
        reward = ((float(is_right) - 0.5) * 2 - bias) * scaling
        prompt_mask = [1] * len(token_ids) + [0] * len(answer)
        rows.append({"ids": token_ids + answer, "prompt_mask": prompt_mask, "reward": reward})
        token_ids = token_ids + answer + reply
    for t in reversed(range(2)):
        rows[t]["reward"] += rows[t + 1]["reward"] * discount

    # The same episode as a rollout.
    tokens = list(prompt)
    sampled = [False] * len(prompt)
    turns = []
    for answer, reply, is_right in zip(answers, replies, success, strict=True):
        grade = Grade(float(is_right), is_right, "")
        turns.append(Turn(len(tokens), len(tokens) + len(answer), "", "stop", grade))
        tokens += answer + reply
        sampled += [True] * len(answer) + [False] * len(reply)
    task = config.TaskConfig(reward_bias=bias, reward_scaling=scaling, turn_discount=discount)
    sampler = replace(make_untrained_sampler(tiny_settings()), task=task)
    [rollout] = sampler.gather_rollouts(
        [
            Rollout(
                problem=Problem("a", "guess", "", 0),
                sample_index=0,
                tokens=np.array(tokens, np.int32),
                sampled=np.array(sampled),
                logps=np.array(sampled, np.float32),
                versions=np.where(sampled, 0, -1),
                turns=tuple(turns),
            )
        ]
    )
    settings = reference.settings(
        task=vars(task),
        rollout={"group_size": 2, "max_turns": 3},
        train={"sequence_per_turn": True},
    )
    group = [rollout, rollout]

    sequences, source = training_sequences(group, settings)

    assert source == [0, 0, 0, 1, 1, 1]
    nothing = [np.zeros(len(tokens))] * 2
    episodes = make_episodes(group, settings, nothing, nothing)
    advantages, _ = algorithms.compute_advantages(episodes, Algorithm(advantage="return_to_go"))
    advantages = spread_over_tokens(advantages, group)[0]
    for sequence, row in zip(sequences[:3], rows, strict=True):
        assert sequence.tokens.tolist() == row["ids"]
        assert (~sequence.sampled).astype(int).tolist() == row["prompt_mask"]
        of_sequence = advantages[: len(row["ids"])][sequence.sampled]
        np.testing.assert_allclose(of_sequence, row["reward"], rtol=1e-6)
