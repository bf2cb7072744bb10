"""Episodes of several turns in training: the advantages of turns, and which tokens have a gradient.

How such episodes are sampled is tested in tests/decoder/test_turns.py.
"""

import statistics
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
import reference
from descriptions import algorithm_of, change, change_advantage, describe
from tiny import make_untrained_sampler, tiny_settings

from jzero import algorithms, config
from jzero.algorithms import ADVANTAGES, Algorithm, Episodes
from jzero.fields import part_name
from jzero.model import qwen
from jzero.sharding.mesh import train_mesh
from jzero.tokens import Tokens
from jzero.training.credit import make_episodes, spread_over_tokens, training_sequences
from jzero.training.step import Minibatch, make_minibatches, score_and_credit
from jzero.training.trainer import Trainer, credit_settings, make_trainer
from jzero.types import Grade, Problem, Rollout, Turn

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
            places = [j for j in range(num_tokens) if episodes.turn[i, j] == t]
            reward = sum(episodes.rewards[i, j] for j in places)
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
    normalizes_twice = describe(algorithm).advantage == "each_group_mean_std"
    within_group = change(algorithm, advantage="group_mean_std") if normalizes_twice else algorithm
    advantages = {}
    for place, key in enumerate(keys):
        is_alone = group.count(group[place]) == 1
        advantages[key] = 0.0
        if not is_alone:
            advantages[key] = reference.group_advantage(values, place, group, within_group)
    if normalizes_twice:
        deviation = statistics.stdev(advantages.values()) + describe(algorithm).std_eps
        advantages = {key: advantage / deviation for key, advantage in advantages.items()}
    return advantages


def slow_token_advantages(
    episodes: Episodes, i: int, algorithm: Algorithm, num_tokens: int
) -> list[float]:
    """Returns the advantages of rollout i's tokens by return_to_go or gae, from the last token on.

    Between two turns gamma is multiplied by the discount of turns.
    """
    description = describe(algorithm)
    with_critic = description.advantage == "gae"
    lam = description.lam if with_critic else 1.0
    turns = episodes.turn[i, :num_tokens].tolist()
    advantages = []
    next_advantage = next_value = 0.0
    for j in reversed(range(num_tokens)):
        ends_turn = j + 1 < num_tokens and turns[j + 1] != turns[j]
        discount = description.gamma * (TURN_DISCOUNT if ends_turn else 1.0)
        value = episodes.values[i, j] if with_critic else 0.0
        delta = episodes.rewards[i, j] + discount * next_value - value
        next_advantage = delta + discount * lam * next_advantage
        next_value = value
        advantages.append(next_advantage)
    return advantages[::-1]


def slow_advantages(episodes: Episodes, algorithm: Algorithm) -> list[list[float]]:
    """Returns the advantage of every token of every rollout, in loops."""
    tokens_of_rollouts = episodes.mask.sum(axis=1)
    if describe(algorithm).advantage in ("return_to_go", "gae"):
        return [
            slow_token_advantages(episodes, i, algorithm, num_tokens)
            for i, num_tokens in enumerate(tokens_of_rollouts)
        ]
    advantage_of_turn = slow_group_advantages(episodes, algorithm)
    advantages = []
    for i, num_tokens in enumerate(tokens_of_rollouts):
        turns = episodes.turn[i, :num_tokens].tolist()
        advantages.append([advantage_of_turn[i, turn] for turn in turns])
    return advantages


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", list(map(part_name, ADVANTAGES)))
def test_the_peers_of_a_turn_are_the_turns_of_the_same_number_in_its_group(
    name: str, seed: int
) -> None:
    algorithm = change_advantage(algorithm_of(advantage=name), gamma=0.9, lam=0.8)
    episodes = random_turns(seed)
    assert episodes.turn.max() >= 3

    advantages, _ = algorithms.compute_advantages(episodes, algorithm)

    expected = slow_advantages(episodes, algorithm)
    for got, want in zip(advantages, expected, strict=True):
        assert got[: len(want)].tolist() == pytest.approx(want, abs=1e-9)
        assert not got[len(want) :].any()


@pytest.mark.parametrize("name", list(map(part_name, ADVANTAGES)))
def test_one_turn_is_an_episode_without_turns(name: str) -> None:
    without_turns = random_turns(9)._replace(turn=None)
    one_turn = without_turns._replace(turn=np.zeros(without_turns.mask.shape, np.int64))
    algorithm = algorithm_of(advantage=name)

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
        tokens=Tokens(tokens, sampled=sampled, logps=logps, versions=np.where(sampled, 0, -1)),
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


@cache
def rloo_trainer(weight: str = "token_mean", **train: object) -> Trainer:
    """Returns a trainer of RLOO without Adam: its optimizer hands the gradient on."""
    settings = reference.settings(
        rollout={"max_new_tokens": 3, "max_turns": 3, "max_reply_tokens": 2},
        task={"turn_discount": TURN_DISCOUNT},
        train={"microbatch_tokens": 256} | train,
        algorithm=vars(change(algorithms.PRESETS["rloo"](), weight=weight)),
    )
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    trainer = make_trainer(settings, reference.MODEL, None, mesh)
    trainer.policy.optimizer = optax.identity()
    return trainer


def packed_minibatch(trainer: Trainer, rollouts: list[Rollout]) -> Minibatch:
    """Returns the rollouts as one minibatch with advantages."""
    [minibatch] = make_minibatches(trainer, rollouts, 1)
    # Nothing is scored, because the first optimizer step is on policy. So no parameters are read.
    score_and_credit(trainer, trainer.policy.abstract_state(), [minibatch], rollouts)
    return minibatch


def gradient_of(trainer: Trainer, minibatch: Minibatch) -> qwen.Params:
    policy = trainer.policy
    state = policy.start(reference.placed(policy, reference.random_params()))
    state, _ = policy.update(state, minibatch.batches, minibatch.counts, trainer.layouts, FAR)
    return jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params)


def have_same_bits(first: qwen.Params, second: qwen.Params) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, first, second))


def change_targets(minibatch: Minibatch, are_trained: bool) -> None:
    """Puts other targets in place of the trained, or of the untrained, targets."""
    batches = []
    for batch in minibatch.batches:
        targets = np.asarray(batch.targets)
        is_chosen = (np.asarray(batch.weights) != 0) == are_trained
        other = np.where(is_chosen, (targets + 1) % reference.VOCAB, targets)
        batches.append(replace(batch, targets=jax.device_put(other, batch.targets.sharding)))
    minibatch.batches = tuple(batches)


def test_all_sampled_tokens_are_trained_and_no_reply() -> None:
    rollouts = random_groups(0)

    minibatch = packed_minibatch(rloo_trainer(), rollouts)

    num_trained = sum(int((np.asarray(b.weights) != 0).sum()) for b in minibatch.batches)
    assert num_trained == sum(int(rollout.tokens.sampled.sum()) for rollout in rollouts)


@pytest.mark.parametrize("are_trained", [False, True])
def test_only_targets_that_are_trained_change_the_gradient(are_trained: bool) -> None:
    """Other targets in place of the replies change no bit."""
    trainer = rloo_trainer()
    minibatch = packed_minibatch(trainer, random_groups(0))
    gradient = gradient_of(trainer, minibatch)

    change_targets(minibatch, are_trained)
    gradient_of_others = gradient_of(trainer, minibatch)

    assert have_same_bits(gradient_of_others, gradient) == (not are_trained)


@pytest.mark.parametrize("packs_per_row", [2, 0])
def test_sequences_of_turns_have_the_same_gradient_where_every_token_weighs_the_same(
    packs_per_row: int,
) -> None:
    rollouts = random_groups(1)
    episode_trainer = rloo_trainer()
    turn_trainer = rloo_trainer(sequence_per_turn=True, packs_per_row=packs_per_row)
    by_episode = packed_minibatch(episode_trainer, rollouts)
    by_turn = packed_minibatch(turn_trainer, rollouts)
    assert len(by_turn.members) == sum(len(rollout.turns) for rollout in rollouts)
    assert len(by_turn.members) > len(by_episode.members)

    got = gradient_of(turn_trainer, by_turn)

    want = gradient_of(episode_trainer, by_episode)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)


def test_sequences_of_turns_have_another_gradient_where_every_sequence_weighs_the_same() -> None:
    rollouts = random_groups(1)
    episode_trainer = rloo_trainer("sequence_mean", sequence_per_turn=False)
    turn_trainer = rloo_trainer("sequence_mean", sequence_per_turn=True)

    by_episode = gradient_of(episode_trainer, packed_minibatch(episode_trainer, rollouts))
    by_turn = gradient_of(turn_trainer, packed_minibatch(turn_trainer, rollouts))

    assert not np.allclose(by_turn["embed"], by_episode["embed"])


# -- AReaL -----------------------------------------------------------------------------------------

PROMPT = [5, 6, 7]
ANSWERS = [[11, 12], [13], [14, 15]]
REPLIES = [[40, 41], [42], []]
IS_RIGHT = [False, False, True]
AREAL_REWARD = config.turns.Success(bias=0.1, scaling=5.0)
AREAL_TASK = config.TaskConfig(turn_reward=AREAL_REWARD, turn_discount=0.9)


@dataclass
class ArealRow:
    """A row as AReaL's agent makes it: one for each turn."""

    tokens: list[int]
    prompt_mask: list[int]
    reward: float


def areal_rows() -> list[ArealRow]:
    """Does the loop of realhf/impl/agent/math_multi_turn_agent.py.

    A row is act.seqs, its prompt mask and the turn's reward. At the end the rewards are discounted
    from the last turn back.
    """
    tokens = list(PROMPT)
    rows = []
    for answer, reply, is_right in zip(ANSWERS, REPLIES, IS_RIGHT, strict=True):
        reward = (float(is_right) - 0.5) * 2 - AREAL_REWARD.bias
        prompt_mask = [1] * len(tokens) + [0] * len(answer)
        rows.append(ArealRow(tokens + answer, prompt_mask, reward * AREAL_REWARD.scaling))
        tokens = tokens + answer + reply
    for t in (1, 0):
        rows[t].reward += rows[t + 1].reward * AREAL_TASK.turn_discount
    return rows


def the_same_episode() -> Rollout:
    """Returns the episode of `areal_rows` with the rewards that the sampler gives it."""
    tokens = list(PROMPT)
    sampled = [False] * len(PROMPT)
    turns = []
    for answer, reply, is_right in zip(ANSWERS, REPLIES, IS_RIGHT, strict=True):
        grade = Grade(float(is_right), is_right, "")
        turns.append(Turn(len(tokens), len(tokens) + len(answer), "", "stop", grade))
        tokens += answer + reply
        sampled += [True] * len(answer) + [False] * len(reply)
    episode = Rollout(
        problem=Problem("a", "guess", "", 0),
        sample_index=0,
        tokens=Tokens(
            tokens,
            sampled=sampled,
            logps=np.array(sampled, np.float32),
            versions=np.where(sampled, 0, -1),
        ),
        turns=tuple(turns),
    )
    sampler = replace(make_untrained_sampler(tiny_settings()), task=AREAL_TASK)
    [rollout] = sampler.gather_rollouts([episode], 1)
    return rollout


def test_sequences_of_turns_are_those_of_areal() -> None:
    rows = areal_rows()
    rollout = the_same_episode()
    group = [rollout, rollout]
    settings = reference.settings(
        task=vars(AREAL_TASK),
        rollout={"group_size": 2, "max_turns": 3},
        train={"sequence_per_turn": True},
    )
    zeros = [np.zeros(len(rollout.tokens))] * 2

    sequences, sources = training_sequences(group, settings.train.sequence_per_turn)
    episodes = make_episodes(group, credit_settings(settings), zeros, zeros)
    advantages_NT, _ = algorithms.compute_advantages(
        episodes, Algorithm(advantage=algorithms.ReturnToGo())
    )

    assert [source.rollout for source in sources] == [0, 0, 0, 1, 1, 1]
    advantages = spread_over_tokens(advantages_NT, group)[0]
    for sequence, row in zip(sequences[:3], rows, strict=True):
        assert sequence.tokens.ids.tolist() == row.tokens
        assert (~sequence.tokens.sampled).astype(int).tolist() == row.prompt_mask
        advantages_of_sequence = advantages[: len(row.tokens)][sequence.tokens.sampled]
        np.testing.assert_allclose(advantages_of_sequence, row.reward, rtol=1e-6)
