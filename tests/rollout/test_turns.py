"""Episodes of several turns: their tokens, their rewards, what is trained, and that none waits for another."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import numpy as np
import optax
import pytest
import reference
import runs
from chat_templates import QWEN25
from test_engine import PROMPTS, assert_empty, make, params_on, seed_on, text_of

from jzero import algorithms, config, train
from jzero.algorithms import ADVANTAGES, Algorithm, Episodes
from jzero.distributed.mesh import train_mesh
from jzero.grading.pool import Pool
from jzero.model import tokenizer
from jzero.rollout.sampler import make_sampler
from jzero.rollout.scheduler import Scheduler
from jzero.rollout.sequence import Sequence, make_groups
from jzero.rollout.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.rollout.turns import TurnGrader
from jzero.run import trajectories
from jzero.run.base_model import read_base_model
from jzero.sft import warm_start
from jzero.tasks import TASKS, guess
from jzero.training import learner
from jzero.training.credit import make_episodes, spread_over_tokens, training_sequences
from jzero.training.step import make_minibatches, make_trainer, score_minibatches
from jzero.types import Grade, Problem, Rollout, Turn

pytestmark = pytest.mark.usefixtures("quick_compilation")

# -- tokens between turns ---------------------------------------------------------------------------------------------

ANSWER, REPLY = "It is \\boxed{7}.", "No. Try again."
CHATML = f"<|im_end|>\n<|im_start|>user\n{REPLY}<|im_end|>\n<|im_start|>assistant\n"

QWEN3 = """{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages %}
{%- if message.role == 'assistant' and loop.index0 >= ns.last %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # in what matters here


@pytest.mark.parametrize("template", ["", QWEN25, QWEN3], ids=["qwen2", "qwen2.5", "qwen3"])
def test_a_chat_template_is_cut_after_the_response(shared, template):
    """Not the tokens of a reply alone, into which Qwen2.5 puts its system prompt; nor what follows the template of the
    conversation so far, to which Qwen3 adds thoughts."""
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    tok.chat_template = template or tok.chat_template
    ids = tokenizer.reply_tokens(tok, REPLY, None)
    assert ids == tokenizer.encode(tok, CHATML) and ids[0] == tok.convert_tokens_to_ids(
        "<|im_end|>"
    )
    for name in ("qwen_math", "qwen3"):
        assert tokenizer.reply_tokens(tok, REPLY, TASKS["math_multiturn"].templates[name].reply) == ids
    if template == QWEN25:
        talk = [{"role": "user", "content": "7?"}, {"role": "assistant", "content": ANSWER}]
        whole = tok.apply_chat_template([*talk, {"role": "user", "content": REPLY}], tokenize=True, return_dict=False,
                                        add_generation_prompt=True)  # fmt: skip
        first = tokenizer.encode(tok, tokenizer.render(tok, talk[:1]))
        assert first + tokenizer.encode(tok, ANSWER) + ids == whole


# -- whole episodes ---------------------------------------------------------------------------------------------------


def tiny(**sections) -> config.Config:
    defaults = {
        "model": {
            "arch": config.ArchitectureConfig(
                hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=8
            )
        },
        "task": {"name": "guess", "template": "plain", "value_max": 7},
        "rollout": {
            "max_prompt_tokens": 8,
            "max_new_tokens": 2,
            "max_turns": 3,
            "max_reply_tokens": 12,
            "num_slots": 16,
            "page_size": 8,
            "decode_steps": 4,
        }
        | {"temperature": 1.0},
        "warm_start": {"steps": 30, "batch_size": 8, "lr": 2e-2, "tries": 3.0},
        "optimizer": {"lr": 1e-3},
        "train": {"microbatch_tokens": 512, "packs_per_row": 1, "checkpoint_every": 2},
        "eval": {"problems": 7, "samples": 1, "greedy": False},
    }
    each = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return reference.settings(**each)


@cache
def sampler_of(slots: int = 16):
    """(tokenizer, sampler without a pool, weights) of a model that has just learnt what an episode looks like."""
    settings = tiny(rollout={"num_slots": slots})
    tok = tokenizer.load("")
    base = read_base_model(settings.model)
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    sampler, publish = make_sampler(settings, base, mesh, None)
    policy = learner.policy_learner(base.model, settings, mesh)
    return (
        tok,
        sampler,
        publish(warm_start(policy, settings, tok, policy.init_params(0), lambda: None)),
    )


def play(count: int = 16, group: int = 4, **task) -> list[Rollout]:
    """Guesses, with the real pool."""
    _, sampler, params = sampler_of()
    settings = tiny(task=task).task
    with Pool(2) as pool:
        sampler = replace(sampler, pool=pool, task=settings)
        problems = sampler.encode_problems(guess.train_problems(settings, 0, 0, count))
        rollouts, _ = sampler.sample_rollouts(params, problems, group, 1.0, (0, 0), version=5)
        assert_empty(sampler.engine)
        return sampler.gather_rollouts(rollouts)


@cache
def played(**task) -> list[Rollout]:
    return play(**task)


def test_every_prompt_extends_the_last_by_the_response_and_the_reply():
    """To the token; an end of turn that was not written is added, and what is added is not sampled."""
    tok, end = sampler_of()[0], sampler_of()[0].eos_token_id
    seen = set()
    for rollout in played():
        assert rollout.tokens[: rollout.prompt_length].tolist() == tokenizer.encode(tok, "1-7\n")
        assert (
            rollout.turns[-1].end == len(rollout.tokens) and rollout.text == rollout.turns[-1].text
        )
        sampled = np.zeros(len(rollout.tokens), bool)
        for turn in rollout.turns:
            assert 1 <= turn.end - turn.start <= 2 and turn.start > 0
            assert turn.text == tokenizer.decode(tok, rollout.tokens[turn.start : turn.end])
            sampled[turn.start : turn.end] = True
        for turn, after in pairwise(rollout.turns):
            written = rollout.tokens[turn.end - 1] == end
            assert (turn.finish_reason == "stop") == written
            between = [] if written else [end]
            between += tokenizer.encode(
                tok, f"{guess.hint(guess.parse_guess(turn.text), rollout.problem.gold)}\n"
            )
            assert rollout.tokens[turn.end : after.start].tolist() == between
            seen.add(written)
        np.testing.assert_array_equal(rollout.sampled, sampled)
        np.testing.assert_array_equal(rollout.versions, np.where(sampled, 5, -1))
        assert (rollout.logps[sampled] < 0).all() and not rollout.logps[~sampled].any()
    assert seen == {True, False}


def test_rewards_and_the_end_of_an_episode():
    settings = {"reward_bias": 0.25, "reward_scaling": 2.0}
    solved = 0
    for rollout in played(**settings):
        right = [turn.grade.correct for turn in rollout.turns]
        assert len(right) == 3 or right[-1]
        assert not any(right[:-1])
        assert [turn.grade.score for turn in rollout.turns] == [
            ((x - 0.5) * 2 - 0.25) * 2.0 for x in right
        ]
        assert rollout.grade.score == pytest.approx(sum(turn.grade.score for turn in rollout.turns))
        assert rollout.grade.correct == any(right)
        solved += any(right)
    assert 0 < solved < len(played(**settings))
    values = train.rollout_metrics(list(played()), 4)
    assert values["reward/accuracy"] > values["turns/first_try"] > 0 and values["turns/mean"] > 1
    for one, other in zip(played(), played(turn_reward="score"), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        assert [turn.grade.score for turn in other.turns] == [
            float(turn.grade.correct) for turn in one.turns
        ]


def test_the_budget_of_tokens_ends_an_episode():
    tok, sampler, _ = sampler_of()
    talk = TurnGrader(
        None,
        tiny().task,
        sampler.engine,
        tok,
        guess.train_problems(tiny().task, 0, 0, 1).__getitem__,
    )
    room = 4 + sampler.engine.settings.longest_continuation
    sequence = Sequence(0, 0, 0, np.zeros(4, np.int32), room, [10, 11])
    wrong = Grade(0.0, False, "", reply="lower")
    between = talk.tokens_before_next_turn(sequence, wrong)
    assert between == [tok.eos_token_id, *tokenizer.encode(tok, "lower\n")]
    for spare, ends in ((1, False), (0, True)):
        sequence.tokens = [10] * (room - 4 - len(between) - spare)
        assert (talk.tokens_before_next_turn(sequence, wrong) is None) == ends
    assert (
        talk.tokens_before_next_turn(
            Sequence(0, 0, 0, np.zeros(4, np.int32), 9), replace(wrong, reply=None)
        )
        is None
    )


def test_training_has_room_for_every_episode():
    """Replies longer than max_reply to prompts shorter than max_prompt: the slot that an episode is packed into holds
    what may follow the longest prompt."""
    settings = tiny(rollout={"max_reply_tokens": 4})
    _, sampler, params = sampler_of()
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    with Pool(1) as pool:
        sampler, _ = make_sampler(settings, read_base_model(settings.model), mesh, pool)
        rollouts, _ = sampler.sample_rollouts(
            params,
            sampler.encode_problems(guess.train_problems(settings.task, 0, 0, 8)),
            2,
            1.0,
            (0, 0),
            version=0,
        )
    lengths = [len(rollout.tokens) - rollout.prompt_length for rollout in rollouts]
    assert (
        max(len(rollout.turns) for rollout in rollouts) == 2
        and max(lengths) <= settings.rollout.longest_continuation
    )


def test_a_slow_grade_changes_nothing(tmp_path, monkeypatch):
    """That it holds nobody up is below, where time is counted in calls."""
    (tmp_path / "sleepy.py").write_text(
        "import time\ndef reward(response, gold, task):\n    time.sleep(0.4 * (gold == 3))\n    return 0.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    late = play(8, 1, reward=config.RewardConfig(functions=("accuracy", "sleepy:reward")))
    assert sum(rollout.problem.gold == 3 for rollout in late) in range(1, 5)
    for one, other in zip(late, play(8, 1), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


# -- slots ------------------------------------------------------------------------------------------------------------


def scripted(sequence: Sequence) -> list[int] | None:
    """A reply, by what was said: 2 to 12 tokens, more than a call; or None."""
    said = int(np.sum(sequence.tokens)) + 7 * sequence.prompt_id + sequence.sample_index
    return None if said % 5 == 0 else [4 + (said + i) % 40 for i in range(2 + said % 11)]


def converse(engine, prompts=PROMPTS, group=2, wait=0, evict=False, stop=(), withheld=None):
    """Episodes of at most 3 turns of 6 tokens -> all their tokens and turns. A reply comes `wait` looks after its turn;
    `evict`: only once the pages are gone; to episodes that `withheld` names only when nothing else is left to do."""
    driver = Scheduler(engine, params_on(engine), text_of)
    driver.settings = replace(driver.settings, stop=stop)
    out: dict[tuple[int, int], tuple[Sequence, int]] = {}
    order: list[tuple[int, int]] = []
    looks = 0

    def replies(must):
        nonlocal looks
        looks += 1
        ready = [key for key, (_, since) in out.items() if must or looks - since > wait]
        ready = [key for key in ready if key != withheld or (must and len(out) == 1)]
        if evict:
            while any(driver.evict_waiting(shard) for shard in range(engine.num_shards)):
                pass
        return [(sequence, scripted(sequence) if len(sequence.turns) < 3 else None) for sequence in
                (out.pop(key)[0] for key in ready)]  # fmt: skip

    done = {}
    for sequence in driver.run(
        make_groups(prompts, group, 6), group, 0.7, seed_on(engine), poll_replies=replies
    ):
        key = sequence.prompt_id, sequence.sample_index
        out[key] = sequence, looks
        done[key] = sequence
        order.append(key)
    assert_empty(engine)
    said = {
        key: (s.tokens, [(t.start, t.end, t.finish_reason) for t in s.turns], s.logps)
        for key, s in done.items()
    }
    return said, order, driver.counters


SIZES = {
    "max_new_tokens": 6,
    "max_turns": 3,
    "max_reply_tokens": 12,
    "max_episode_tokens": 68,
    "decode_steps": 4,
}


def assert_equal(got, want):
    assert got.keys() <= want.keys()
    for key in got:
        assert got[key][:2] == want[key][:2], key
        np.testing.assert_allclose(got[key][2], want[key][2], atol=1e-5)


@pytest.mark.parametrize(
    "name, stop", [("qwen2", ()), ("qwen3", ("!", "A", "Z", "k"))], ids=["ids", "strings"]
)
def test_an_episode_is_the_same_however_it_was_decoded(name, stop):
    """Pages kept or given up, a prompt or a conversation prefilled, alone or in company, in few pages or many."""
    engine = make(name, **SIZES)
    want, _, kept = converse(engine, stop=stop)
    again, _, counts = converse(engine, stop=stop, evict=True)
    assert_equal(again, want)
    assert (
        counts.prefill_tokens > kept.prefill_tokens == sum(map(len, PROMPTS))
    )  # kept: the prompts alone
    assert max(len(turns) for _, turns, _ in want.values()) == 3
    assert_equal(converse(engine, stop=stop, wait=3)[0], want)
    small = make(name, **SIZES, num_slots=3, num_pages=6)
    got, _, counts = converse(small, stop=stop)
    assert_equal(got, want)
    assert counts.prefill_tokens > kept.prefill_tokens
    assert_equal(converse(make(name, **SIZES, num_slots=2), stop=stop)[0], want)
    assert_equal(converse(make(name, (2, 1), **SIZES), stop=stop)[0], want)
    alone, _, _ = converse(engine, PROMPTS[:1], stop=stop)
    assert_equal(alone, want)


def test_an_episode_that_waits_gives_way():
    """One whose reply does not come: all others end before it goes on, in fewer slots than episodes."""
    engine = make("qwen2", **SIZES, num_slots=2)
    want, _, _ = converse(engine)
    key = next(key for key, (_, turns, _) in want.items() if len(turns) == 3 and key[0] == 0)
    got, order, _ = converse(engine, withheld=key)
    assert_equal(got, want)
    assert order[-2:] == [key, key] and order.index(key) < 4


def test_programs_are_planned_as_they_run():
    """What is compiled ahead of time takes what `generate` is called with."""
    engine = make("qwen2", **SIZES)
    converse(engine, PROMPTS[:1])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params_on(engine)
    )
    program, arguments = engine.programs(abstract, [])["generate"]
    assert program is engine._programs["generate"] and len(arguments) == 8
    program.lower(*arguments)


# -- returns and advantages -------------------------------------------------------------------------------------------


def random_turns(seed: int) -> Episodes:
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(5), [1, 2, 3, 4, 6]))
    mask = np.arange(12) < rng.integers(1, 13, len(group))[:, None]
    turn = np.cumsum(np.pad(rng.random((len(group), 11)) < 0.3, ((0, 0), (1, 0))), axis=1)
    turn = np.minimum(turn, np.where(mask, turn, 0).max(axis=1, keepdims=True))
    rewards = rng.choice([0.0, 0.1, 1.0, -1.0], mask.shape) * mask
    return Episodes(
        rewards, rng.normal(size=mask.shape) * mask, mask, group, turn, turn_discount=0.7
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_turns(name):
    """Against loops: G_t = r_t + 0.7 G_{t+1}; peers are the group's turns of the same number."""
    algorithm = Algorithm(advantage=name, gamma=0.9, lam=0.8)
    for seed in range(4):
        episodes = random_turns(seed)
        assert episodes.turn.max() >= 3
        G = {}  # (rollout, turn) -> its return
        for i, count in enumerate(episodes.mask.sum(axis=1)):
            for t in reversed(range(episodes.turn[i, count - 1] + 1)):
                mine = [episodes.rewards[i, j] for j in range(count) if episodes.turn[i, j] == t]
                G[i, t] = sum(mine) + 0.7 * G.get((i, t + 1), 0.0)
        keys = sorted(G)
        got, _ = algorithms.compute_advantages(episodes, algorithm)
        for i, count in enumerate(episodes.mask.sum(axis=1)):
            turns, discounts = episodes.turn[i, :count].tolist(), []
            for j in range(count):
                discounts.append(0.9 * (0.7 if j + 1 < count and turns[j + 1] != turns[j] else 1.0))
            after = value = 0.0
            for j in reversed(range(count)):
                if name in ("return_to_go", "gae"):
                    V, lam = (episodes.values[i, j], 0.8) if name == "gae" else (0.0, 1.0)
                    after = (
                        episodes.rewards[i, j]
                        + discounts[j] * value
                        - V
                        + discounts[j] * lam * after
                    )
                    value, want = V, after
                else:
                    k = keys.index((i, turns[j]))
                    of = sorted({(int(episodes.group[r]), t) for r, t in keys})
                    number = [of.index((int(episodes.group[r]), t)) for r, t in keys]
                    peers = [G[key] for key, n in zip(keys, number, strict=True) if n == number[k]]
                    alone = len(peers) == 1
                    want = (
                        0.0
                        if alone
                        else reference.group_advantage(
                            [G[key] for key in keys], k, number, algorithm
                        )
                    )
                assert got[i, j] == pytest.approx(want, abs=1e-9)
            assert not got[i, count:].any()


def test_one_turn_is_what_it_was():
    for name in ADVANTAGES:
        episodes = random_turns(9)._replace(turn=None)
        one = episodes._replace(turn=np.zeros(episodes.mask.shape, np.int64))
        got, want = (
            algorithms.compute_advantages(x, Algorithm(advantage=name))[0] for x in (one, episodes)
        )
        np.testing.assert_allclose(got, want, atol=1e-12)


# -- what is trained --------------------------------------------------------------------------------------------------


def random_episode(rng, problem: Problem, head: np.ndarray, sample: int) -> Rollout:
    """One to three turns of 1 to 3 tokens, and replies of 1 or 2."""
    tokens, sampled, turns = list(head), [False] * len(head), []
    count = int(rng.integers(1, 4))
    for t in range(count):
        new, reply = rng.integers(1, 4), 0 if t == count - 1 else rng.integers(1, 3)
        grade = Grade(float(rng.choice([-1.0, 0.5, 1.0])), False, "")
        turns.append(
            Turn(len(tokens), len(tokens) + int(new), "", "stop" if new < 3 else "length", grade)
        )
        tokens += rng.integers(0, reference.VOCAB, new + reply).tolist()
        sampled += [True] * new + [False] * reply
    logps = np.where(sampled, rng.normal(-4, 0.3, len(tokens)), 0).astype(np.float32)
    whole = Grade(sum(turn.grade.score for turn in turns), False, "")
    versions = np.where(sampled, 0, -1).astype(np.int32)
    return Rollout(
        problem,
        sample,
        np.array(tokens, np.int32),
        np.array(sampled),
        logps,
        versions,
        tuple(turns),
        whole,
    )


def random_groups(seed: int) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    out = []
    for p in range(4):
        head = rng.integers(0, reference.VOCAB, rng.integers(1, 7))
        out += [
            random_episode(rng, Problem(f"slow/{p}", "guess", "", {}), head, g) for g in range(4)
        ]
    return out


FAR = 2.0**40  # see test_update


def gradient_of(rollouts, change=lambda batch: batch, algorithm=None, **train):
    settings = reference.settings(
        rollout={"max_new_tokens": 3, "max_turns": 3, "max_reply_tokens": 2},
        task={"turn_discount": 0.7},
        train={"microbatch_tokens": 256} | train,
        algorithm=vars(algorithm or algorithms.PRESETS["rloo"](weight="token_mean")),
    )
    mesh = train_mesh(1, 1, 1, jax.devices()[:1])
    trainer = make_trainer(settings, reference.MODEL, None, mesh)
    trainer.policy.optimizer = optax.identity()
    [part] = make_minibatches(trainer, rollouts, 1)
    score_minibatches(trainer, trainer.policy.abstract_state(), [part], rollouts)
    policy = trainer.policy
    state = policy.start(reference.placed(policy, reference.random_params()))
    batches = tuple(change(batch) for batch in part.batches)
    state, _ = policy.update(state, batches, part.counts, trainer.layouts, FAR)
    return jax.tree.map(lambda x: -np.asarray(x) / FAR, state.params), part


def test_replies_have_no_gradient():
    """Other targets in their place change no bit of it; in the place of a response they do."""
    rollouts = random_groups(0)
    trained = int(sum(rollout.sampled.sum() for rollout in rollouts))

    def change(batch, where):
        targets = np.asarray(batch.targets)
        assert (np.asarray(batch.weights) != 0).sum() == trained
        other = np.where(where(np.asarray(batch.weights)), (targets + 1) % reference.VOCAB, targets)
        return replace(batch, targets=jax.device_put(other, batch.targets.sharding))

    want, _ = gradient_of(rollouts)
    got, _ = gradient_of(rollouts, lambda batch: change(batch, lambda w: w == 0))
    other, _ = gradient_of(rollouts, lambda batch: change(batch, lambda w: w != 0))
    assert jax.tree.all(jax.tree.map(np.array_equal, got, want))
    assert not jax.tree.all(jax.tree.map(np.array_equal, other, want))


def test_a_row_a_turn_trains_the_same():
    """Where every token weighs the same."""
    rollouts = random_groups(1)
    want, whole = gradient_of(rollouts)
    for slots in (2, 0):
        got, part = gradient_of(rollouts, sequence_per_turn=True, packs_per_row=slots)
        assert (
            len(part.chosen) == sum(len(rollout.turns) for rollout in rollouts) > len(whole.chosen)
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, want)
    means = algorithms.PRESETS["rloo"](weight="sequence_mean")
    assert not np.allclose(
        *(
            gradient_of(rollouts, algorithm=means, sequence_per_turn=x)[0]["embed"]
            for x in (True, False)
        )
    )


def test_rows_are_those_of_areal():
    """realhf/impl/agent/math_multi_turn_agent.py: a row is act.seqs, its prompt mask and r_t; then rewards are
    discounted from the last turn back."""
    prompt, replies = [5, 6, 7], [[40, 41], [42]]
    answers, success = [[11, 12], [13], [14, 15]], [False, False, True]
    bias, scaling, discount = 0.1, 5.0, 0.9
    token_ids, rows, turns, tokens = list(prompt), [], [], list(prompt)
    for t, answer in enumerate(answers):  # the agent's loop
        seqs = token_ids + answer
        reward = ((float(success[t]) - 0.5) * 2 - bias) * scaling
        rows.append(
            {"ids": seqs, "prompt_mask": [1] * len(token_ids) + [0] * len(answer), "reward": reward}
        )
        token_ids = seqs + (replies[t] if t < 2 else [])
    for t in reversed(range(2)):
        rows[t]["reward"] += rows[t + 1]["reward"] * discount

    for t, answer in enumerate(answers):
        grade = Grade(float(success[t]), success[t], "")
        turns.append(Turn(len(tokens), len(tokens) + len(answer), "", "stop", grade))
        tokens += answer + (replies[t] if t < 2 else [])
    sampled = np.array(
        [any(turn.start <= i < turn.end for turn in turns) for i in range(len(tokens))]
    )
    arrays = (
        np.array(tokens, np.int32),
        sampled,
        sampled.astype(np.float32),
        np.where(sampled, 0, -1),
    )
    rollout = Rollout(Problem("a", "guess", "", 0), 0, *arrays, tuple(turns))
    task = config.TaskConfig(reward_bias=bias, reward_scaling=scaling, turn_discount=discount)
    [rollout] = replace(sampler_of()[1], task=task).gather_rollouts([rollout])
    settings = reference.settings(
        task=vars(task),
        rollout={"group_size": 2, "max_turns": 3},
        train={"sequence_per_turn": True},
    )
    got, source = training_sequences([rollout, rollout], settings)
    assert source == [0, 0, 0, 1, 1, 1]
    nothing = [np.zeros(len(tokens))] * 2
    A, _ = algorithms.compute_advantages(
        make_episodes([rollout, rollout], settings, nothing, nothing),
        Algorithm(advantage="return_to_go"),
    )
    A = spread_over_tokens(A, [rollout, rollout])[0]
    for mine, row in zip(got, rows, strict=False):
        assert (
            mine.tokens.tolist() == row["ids"]
            and (~mine.sampled).astype(int).tolist() == row["prompt_mask"]
        )
        np.testing.assert_allclose(A[: len(row["ids"])][mine.sampled], row["reward"], rtol=1e-6)


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_feedback_and_hints():
    right, wrong = ("7", Grade(1.0, True, "")), ("3", Grade(0.0, False, ""))
    task = config.TaskConfig(value_max=9, feedback_wrong="Nope.", template="plain")
    assert (
        TASKS["math_multiturn"].reply({}, [wrong], task)
        == TASKS["countdown"].reply({}, [wrong], task)
        == "Nope."
    )
    assert (
        TASKS["math_multiturn"].reply({}, [wrong, right], task)
        == config.TaskConfig().feedback_right
    )
    assert [guess.reply(7, [(text, Grade(0.0, False, ""))], task) for text in ("3", "9", "x")] == [
        "higher", "lower", "no number"]  # fmt: skip
    assert guess.reply(7, [wrong, right], task) is None
    assert [
        guess.grade(text, 7, task).correct for text in ("7", " 7\n", "07", "7 8", "-7", "")
    ] == [True] * 3 + [False] * 3
    golds = [problem.gold for problem in guess.eval_problems(task, 18)]
    assert sorted(golds) == sorted([*range(1, 10)] * 2) and golds[:9] != golds[9:]
    text, response = guess.example(task, 0, 3, 3.0)
    assert text.startswith("1-9\n") and 1 <= int(response) <= 9
    with Pool(1) as pool:
        for name, response, gold in (("math_multiturn", "\\boxed{3}", "4"), ("countdown", "x", "")):
            golds = {"answer": gold, "question": ""} if gold else {"numbers": [1, 2], "target": 3}
            settings = config.TaskConfig(name=name, feedback_wrong="Nope.", template="qwen_math")
            pool.submit(name, name, response, golds, settings, [])
            pool.submit((name, "last"), name, response, golds, settings)
        said = dict(pool.drain())
    assert {key: grade.reply for key, grade in said.items() if grade.reply} == dict.fromkeys(
        ("math_multiturn", "countdown"), "Nope.")  # fmt: skip


def test_turns_cross_hosts():
    rollouts = list(played())
    got = rollouts_from_bytes([rollouts_to_bytes(rollouts[:8]), rollouts_to_bytes(rollouts[8:])])
    for one, other in zip(got, rollouts, strict=True):
        jax.tree.map(np.testing.assert_array_equal, vars(one), vars(other))
    assert [each.turns for each in got] == [each.turns for each in rollouts]
    assert [each.grade for each in got] == [each.grade for each in rollouts]


def test_the_monitor_says_what_happened(tmp_path):
    rollouts = [
        replace(rollout, problem=replace(rollout.problem, id="guess/train/0"))
        for rollout in played()[:4]
    ]
    trajectories.write_trajectories(tmp_path, rollouts)
    lines = (tmp_path / "trajectories/5/guess_train_0.jsonl").read_text().splitlines()
    for line, rollout in zip(lines, rollouts, strict=True):
        row = json.loads(line)
        assert (row["version_head"], row["version_tail"], row["prompt_length"]) == (5, 5, 4)
        assert [turn["success"] for turn in row["turns"]] == [
            turn.grade.correct for turn in rollout.turns
        ]
        assert (
            sum(turn["answer_length"] for turn in row["turns"])
            == row["answer_length"]
            == rollout.sampled.sum()
        )
        assert [turn["prompt_length"] for turn in row["turns"]] == [
            turn.start for turn in rollout.turns
        ]
    text = (tmp_path / "trajectories/5/guess_train_0.txt").read_text()
    assert text.count("--- turn") == sum(len(r.turns) for r in rollouts) and "--- reply\n" in text


def test_impossible_settings(tmp_path):
    with pytest.raises(ValueError, match="task.name=gsm8k has no replies in"):
        train.check(tiny(task={"name": "gsm8k", "template": "qwen_math"}), tmp_path)
    with pytest.raises(
        ValueError,
        match="rollout.max_episode_tokens=10 is shorter than a prompt and a response, 11",
    ):
        tiny(rollout={"max_episode_tokens": 10, "max_new_tokens": 3})
    with pytest.raises(
        ValueError,
        match="train.pack_length=20 is shorter than what may follow a prompt: set it to 30",
    ):
        tiny(train={"pack_length": 20})


def test_a_run_resumes_to_the_same_numbers(tmp_path, quick_runs):
    settings = lambda steps: tiny(train={"steps": steps, "logged_rollouts": 2})
    train.train(settings(4), tmp_path / "whole")
    for steps in (2, 4):
        train.train(settings(steps), tmp_path / "resumed")
    whole, resumed = (
        slow_free(runs.timeless(tmp_path / name / "metrics.jsonl")) for name in ("whole", "resumed")
    )
    assert len(whole) == 4 and whole == resumed and all(row["turns/mean"] > 1 for row in whole)
    weights = [
        (tmp_path / name / "export-4/model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    ]
    assert weights[0] == weights[1]
    names = [
        sorted(p.name for p in (tmp_path / x / "trajectories").rglob("*"))
        for x in ("whole", "resumed")
    ]
    assert names[0] == names[1] and "guess_train_4.txt" in names[0]


def slow_free(rows: list[dict]) -> list[dict]:
    """Without what depends on when a reply came: log-probs of a prefill and a decode step differ in the last digits."""
    timed = lambda name: (
        name.startswith("eval") or name in ("rollout/slot_utilization", "policy/mismatch")
    )
    return [{name: value for name, value in row.items() if not timed(name)} for row in rows]
