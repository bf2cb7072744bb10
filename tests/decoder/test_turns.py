"""Episodes of several turns: their tokens, their rewards, and that no episode waits for another.

What is trained on such episodes is tested in tests/training/test_turns_in_training.py.
"""

import json
import re
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
from test_engine import PROMPTS, assert_empty, make, new_engine, params_on, seed_on, text_of
from tiny import QWEN25, make_untrained_sampler, tiny_settings, trained_player

from jzero import config, setup
from jzero.config import turns
from jzero.decoder.abstract_calls import abstract_calls
from jzero.decoder.engine import Engine
from jzero.decoder.scheduler import PATIENCE, Scheduler
from jzero.decoder.sequence import DecodeCounters, Reply, Sequence, make_groups
from jzero.decoder.serialization import rollouts_from_bytes, rollouts_to_bytes
from jzero.loops import rl
from jzero.model import chat_template, tokenizer
from jzero.rollout.rollout_metrics import rollout_metrics
from jzero.rollout.turns import TurnGrader
from jzero.run import trajectories
from jzero.tasks import TASKS, find_task, guess
from jzero.tokens import Tokens
from jzero.types import Grade, Problem, Rollout, Turn, grade_of
from jzero.workers.pipe import TurnRequest
from jzero.workers.pool import Pool

pytestmark = pytest.mark.usefixtures("quick_runs")


# -- tokens between turns --------------------------------------------------------------------------

ANSWER = "It is \\boxed{7}."
REPLY = "No. Try again."
CHATML = f"<|im_end|>\n<|im_start|>user\n{REPLY}<|im_end|>\n<|im_start|>assistant\n"

# What matters here of Qwen3's template: it adds thoughts to the last answer.
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages %}"
    "{%- if message.role == 'assistant' and loop.index0 >= ns.last %}"
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n'"
    " + message.content.split('</think>')[-1].lstrip('\\n') }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.mark.parametrize("template", ["", QWEN25, QWEN3], ids=["qwen2", "qwen2.5", "qwen3"])
def test_a_chat_template_is_cut_after_the_response(shared: Path, template: str) -> None:
    """The tokens between turns are what the template writes between two messages.

    They are not the tokens of the reply alone, into which Qwen2.5 puts its system prompt, nor what
    follows the template of the conversation so far, to which Qwen3 adds thoughts.
    """
    tok = tokenizer.load(str(shared / "data/qwen2_tokenizer"))
    tok.chat_template = template or tok.chat_template

    ids = tokenizer.reply_tokens(tok, REPLY, None)

    assert ids == tokenizer.encode(tok, CHATML)
    assert ids[0] == tok.convert_tokens_to_ids("<|im_end|>")
    for name in ("qwen_math", "qwen3"):
        assert (
            tokenizer.reply_tokens(tok, REPLY, TASKS["math_multiturn"].templates[name].reply) == ids
        )
    if template == QWEN25:
        conversation = [
            {"role": "user", "content": "7?"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": REPLY},
        ]
        all_tokens = tok.apply_chat_template(
            conversation, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(tok, chat_template.render(tok, conversation[:1]))
        assert prompt + tokenizer.encode(tok, ANSWER) + ids == all_tokens


def test_the_budget_of_tokens_ends_an_episode() -> None:
    player = trained_player()
    settings = tiny_settings()
    problems = guess.train_problems(settings.task, 0, 0, 1)
    engine = player.sampler.engine
    grader = TurnGrader(
        Pool(0),
        settings.task,
        engine.settings,
        engine.stop_ids,
        player.tokenizer,
        problems.__getitem__,
    )
    prompt = np.zeros(4, np.int32)
    room = len(prompt) + engine.settings.longest_continuation
    sequence = Sequence(0, 0, 0, prompt, room)
    sequence.tokens.append([10, 11])
    wrong = Grade(0.0, False, "", reply="lower")

    between = grader.tokens_before_next_turn(sequence, wrong)

    assert between is not None
    end_of_turn = player.tokenizer.eos_token_id
    assert between == [end_of_turn, *tokenizer.encode(player.tokenizer, "lower\n")]
    for num_spare, is_over in ((1, False), (0, True)):
        sequence.tokens = Tokens([10] * (room - len(between) - num_spare))
        assert (grader.tokens_before_next_turn(sequence, wrong) is None) == is_over
    no_reply = replace(wrong, reply=None)
    assert grader.tokens_before_next_turn(Sequence(0, 0, 0, prompt, 9), no_reply) is None


def test_a_problem_of_another_task_is_answered_in_one_turn() -> None:
    """An evaluation suite, such as countdown in a run of guess, gets no replies."""
    player = trained_player()
    task = tiny_settings().task
    problems = [
        Problem("0", "guess", "1-7\n", 3),
        Problem("1", "countdown", "2 1=3", {"numbers": [1, 2], "target": 3}),
    ]
    replies = []

    with Pool(1) as pool:
        engine = player.sampler.engine
        grader = TurnGrader(
            pool, task, engine.settings, engine.stop_ids, player.tokenizer, problems.__getitem__
        )
        for number in range(2):
            sequence = Sequence(number, 0, 0, np.zeros(4, np.int32), 20)
            sequence.tokens.append([10])
            sequence.turns = [Turn(0, 1, "x", "stop")]
            grader.submit(sequence)
        while grader.in_grading:
            replies += grader.poll_replies(wait=True)

    has_reply = {sequence.prompt_id: tokens is not None for sequence, tokens in replies}
    assert has_reply == {0: True, 1: False}


# -- whole episodes --------------------------------------------------------------------------------


def play(num_problems: int = 16, group_size: int = 4, **task: object) -> list[Rollout]:
    """Returns graded games of the trained player, with `task` settings changed."""
    task_settings = tiny_settings(task=task).task
    problems = guess.train_problems(task_settings, 0, 0, num_problems)
    return play_problems(task_settings, problems, group_size)


def play_problems(
    task: config.TaskConfig, problems: list[Problem], group_size: int = 4
) -> list[Rollout]:
    """Returns graded games of the trained player on given problems."""
    player = trained_player()
    with Pool(2) as pool:
        sampler = replace(player.sampler, pool=pool, task=task)
        rollouts, _ = sampler.sample_rollouts(
            player.params,
            sampler.encode_problems(problems),
            group_size=group_size,
            temperature=1.0,
            key=(0, 0),
            version=5,
        )
        assert_empty(sampler.engine)
        return sampler.gather_rollouts(rollouts, group_size)


@cache
def played(**task: Any) -> list[Rollout]:
    """Returns the games of `play`, which tests share."""
    return play(**task)


def test_every_prompt_extends_the_last_by_the_response_and_the_reply() -> None:
    """To the token. An end of turn that the policy did not write is added, and is not sampled."""
    tok = trained_player().tokenizer
    end_of_turn = tok.eos_token_id
    seen = set()
    for rollout in played():
        assert rollout.tokens.ids[: rollout.prompt_length].tolist() == tokenizer.encode(
            tok, "1-7\n"
        )
        assert rollout.turns[-1].end == len(rollout.tokens)
        assert rollout.text == rollout.turns[-1].text
        sampled = np.zeros(len(rollout.tokens), bool)
        for turn in rollout.turns:
            assert 1 <= turn.end - turn.start <= 2
            assert turn.start > 0
            assert turn.text == tokenizer.decode(
                tok, rollout.tokens.ids[turn.start : turn.end].tolist()
            )
            sampled[turn.start : turn.end] = True
        for turn, next_turn in pairwise(rollout.turns):
            wrote_end = bool(rollout.tokens.ids[turn.end - 1] == end_of_turn)
            assert (turn.finish_reason == "stop") == wrote_end
            hint = guess.hint(guess.parse_guess(turn.text), rollout.problem.gold)
            between = [] if wrote_end else [end_of_turn]
            between += tokenizer.encode(tok, f"{hint}\n")
            assert rollout.tokens.ids[turn.end : next_turn.start].tolist() == between
            seen.add(wrote_end)
        np.testing.assert_array_equal(rollout.tokens.sampled, sampled)
        np.testing.assert_array_equal(rollout.tokens.versions, np.where(sampled, 5, -1))
        assert (rollout.tokens.logps[sampled] < 0).all()
        assert not rollout.tokens.logps[~sampled].any()
    assert seen == {True, False}


def test_rewards_and_the_end_of_an_episode() -> None:
    rollouts = played(turn_reward=turns.Success(bias=0.25, scaling=2.0))
    num_solved = 0
    for rollout in rollouts:
        is_right = [grade_of(turn).correct for turn in rollout.turns]
        assert len(is_right) == 3 or is_right[-1]
        assert not any(is_right[:-1])
        scores = [grade_of(turn).score for turn in rollout.turns]
        assert scores == [((right - 0.5) * 2 - 0.25) * 2.0 for right in is_right]
        assert grade_of(rollout).score == pytest.approx(sum(scores))
        assert grade_of(rollout).correct == any(is_right)
        num_solved += any(is_right)
    assert 0 < num_solved < len(rollouts)


def test_an_environment_with_state_plays_as_the_task_that_keeps_none(tmp_path: Path) -> None:
    """The class of docs/environments.md is the game of the task guess, with the same hints."""
    page = (runs.ROOT / "docs/environments.md").read_text(encoding="utf-8")
    [source] = re.findall(r"<!-- file: halving.py -->\n```python\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "halving.py"
    path.write_text(source, encoding="utf-8")
    task = tiny_settings(
        task={
            "name": "environment",
            "environment": f"{path}:Guess",
            "turn_reward": "score",
        }
    ).task
    problems = find_task("environment").train_problems(task, 0, 0, 16)
    same = [replace(p, task="guess", gold=1 + p.gold["seed"] % 7) for p in problems]

    in_environment = play_problems(task, problems)
    in_task = play_problems(tiny_settings().task, same)

    assert max(len(rollout.turns) for rollout in in_environment) == 3
    for rollout, other in zip(in_environment, in_task, strict=True):
        assert rollout.tokens.ids.tolist() == other.tokens.ids.tolist()
        assert rollout.tokens.sampled.tolist() == other.tokens.sampled.tolist()
        grade, other_grade = grade_of(rollout), grade_of(other)
        assert grade.correct == other_grade.correct and not grade.failed
        found = 1 + 0.1 / len(rollout.turns) if grade.correct else 0.0
        assert grade.score == pytest.approx(found)


def test_turns_are_counted_in_the_metrics() -> None:
    values = rollout_metrics(list(played()), 4)

    assert values["reward/accuracy"] > values["turns/first_try"] > 0
    assert values["turns/mean"] > 1


def test_the_reward_of_a_turn_may_be_its_score() -> None:
    for success, score in zip(played(), played(turn_reward=turns.Score()), strict=True):
        np.testing.assert_array_equal(success.tokens.ids, score.tokens.ids)
        scores = [grade_of(turn).score for turn in score.turns]
        assert scores == [float(grade_of(turn).correct) for turn in success.turns]


def test_training_has_room_for_every_episode() -> None:
    """Replies may be longer than max_reply_tokens, and prompts shorter than max_prompt_tokens.

    The slot that an episode is packed into holds what may follow the longest prompt.
    """
    settings = tiny_settings(rollout={"max_reply_tokens": 4})
    with Pool(1) as pool:
        sampler = make_untrained_sampler(settings, pool)
        problems = sampler.encode_problems(guess.train_problems(settings.task, 0, 0, 8))
        rollouts, _ = sampler.sample_rollouts(
            trained_player().params,
            problems,
            group_size=4,
            temperature=1.0,
            key=(0, 0),
            version=0,
        )
    lengths = [len(rollout.tokens) - rollout.prompt_length for rollout in rollouts]
    assert max(len(rollout.turns) for rollout in rollouts) == 2
    assert max(lengths) <= settings.rollout.longest_continuation


def test_a_slow_grade_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a slow grade holds nobody up is tested below, where time is counted in calls."""
    source = (
        "import time\n"
        "def reward(response, gold, task):\n"
        "    time.sleep(0.4 * (gold == 3))\n"
        "    return 0.0\n"
    )
    (tmp_path / "sleepy.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    late = play(8, reward=config.RewardConfig(functions=("accuracy", "sleepy:reward")))

    assert 4 <= sum(rollout.problem.gold == 3 for rollout in late) <= 16
    for one, other in zip(late, play(8), strict=True):
        np.testing.assert_array_equal(one.tokens.ids, other.tokens.ids)


def test_a_prompt_is_tokenized_once_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to check its length, nor to sample from it, nor to sample from it again."""
    player = trained_player()
    settings = tiny_settings().task
    texts: list[str] = []
    encode = tokenizer.encode

    def record(tok: tokenizer.PreTrainedTokenizerFast, text: str) -> list[int]:
        texts.append(text)
        return encode(tok, text)

    monkeypatch.setattr(tokenizer, "encode", record)
    with Pool(1) as pool:
        sampler = replace(player.sampler, pool=pool)
        problems = sampler.encode_problems(guess.train_problems(settings, 0, 0, 4))
        for version in range(2):
            sampler.sample_rollouts(
                player.params,
                problems,
                group_size=4,
                temperature=1.0,
                key=(0, 0),
                version=version,
            )

    assert texts.count("1-7\n") == len(problems) == 4


def test_prompts_that_are_too_long_are_dropped_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sampler = trained_player().sampler
    short, long = Problem("a", "guess", "1-7\n", 1), Problem("b", "guess", "1-7\n" * 9, 1)

    encoded = sampler.encode_problems([long, short], "mine")

    assert [item.problem for item in encoded] == [short]
    assert encoded[0].prompt_tokens.tolist() == tokenizer.encode(sampler.tokenizer, "1-7\n")
    assert "mine: 1 of 2 prompts dropped, longer than 8 tokens" in capsys.readouterr().out


# -- slots -----------------------------------------------------------------------------------------

SIZES = {
    "max_new_tokens": 6,
    "max_turns": 3,
    "max_reply_tokens": 12,
    "max_episode_tokens": 68,
    "decode_steps": 4,
}


@dataclass
class Conversation:
    """What came of the episodes of one run, by (prompt_id, sample_index)."""

    tokens: dict[tuple[int, int], list[int]]
    turns: dict[tuple[int, int], list[tuple[int, int, str]]]  # start, end, finish reason
    logps: dict[tuple[int, int], list[float]]
    order: list[tuple[int, int]]  # whose turn ended, in the order in which turns ended
    counters: DecodeCounters


def scripted_reply(sequence: Sequence) -> list[int] | None:
    """Returns a reply that depends on what was said: 2 to 12 tokens, more than a call; or None."""
    number = int(np.sum(sequence.new_tokens)) + 7 * sequence.prompt_id + sequence.sample_index
    if number % 5 == 0 or len(sequence.turns) >= 3:
        return None
    return [4 + (number + i) % 40 for i in range(2 + number % 11)]


def converse(
    engine: Engine,
    prompts: SequenceOf[np.ndarray] = PROMPTS,
    wait: int = 0,
    evict: bool = False,
    stop: tuple[str, ...] = (),
    withheld: tuple[int, int] | None = None,
) -> Conversation:
    """Runs two episodes a prompt, of at most 3 turns of 6 tokens, to their end.

    A reply comes `wait` looks after its turn ended. With `evict` it comes only once the episode's
    pages are gone. The episode `withheld` gets its replies only when nothing else is left to do.
    """
    scheduler = Scheduler(engine, params_on(engine), text_of)
    scheduler.settings = replace(scheduler.settings, stop=stop)
    in_grading: dict[tuple[int, int], tuple[Sequence, int]] = {}
    num_looks = 0

    def poll_replies(must_wait: bool) -> list[Reply]:
        nonlocal num_looks
        num_looks += 1
        ready = []
        for key, (_, since) in in_grading.items():
            is_due = must_wait or num_looks - since > wait
            if is_due and (key != withheld or (must_wait and len(in_grading) == 1)):
                ready.append(key)
        if evict:
            for shard in range(engine.num_shards):
                while scheduler.evict_waiting(shard):
                    pass
        sequences = [in_grading.pop(key)[0] for key in ready]
        return [(sequence, scripted_reply(sequence)) for sequence in sequences]

    finished: dict[tuple[int, int], Sequence] = {}
    order = []
    groups = make_groups(list(prompts), 2, 6)
    for sequence in scheduler.run(groups, 2, 0.7, seed_on(engine), poll_replies=poll_replies):
        key = sequence.prompt_id, sequence.sample_index
        in_grading[key] = sequence, num_looks
        finished[key] = sequence
        order.append(key)
    assert_empty(engine)
    return Conversation(
        {key: sequence.new_tokens for key, sequence in finished.items()},
        {
            key: [(turn.start, turn.end, turn.finish_reason) for turn in sequence.turns]
            for key, sequence in finished.items()
        },
        {key: sequence.new_logps for key, sequence in finished.items()},
        order,
        scheduler.counters,
    )


def assert_same(got: Conversation, want: Conversation, atol: float = 1e-5) -> None:
    """Asserts that the episodes of `got`, which may be fewer, are those of `want`."""
    assert got.tokens.keys() <= want.tokens.keys()
    for key in got.tokens:
        assert got.tokens[key] == want.tokens[key], key
        assert got.turns[key] == want.turns[key], key
        np.testing.assert_allclose(got.logps[key], want.logps[key], atol=atol)


@pytest.mark.parametrize(
    "name, stop",
    [
        ("qwen2", ()),
        ("qwen2", ("!", "A", "Z", "k")),
        ("qwen3", ("!", "A", "Z", "k")),
    ],
    ids=["ids", "strings", "qwen3"],
)
def test_an_episode_is_the_same_however_it_was_decoded(name: str, stop: tuple[str, ...]) -> None:
    """Pages kept or given up, alone or in company, in few slots or many."""
    engine = make(name, **SIZES)
    want = converse(engine, stop=stop)
    assert max(len(turns) for turns in want.turns.values()) == 3
    # Episodes that keep their pages prefill their prompts alone.
    assert want.counters.prefill_tokens == sum(map(len, PROMPTS))

    evicted = converse(engine, stop=stop, evict=True)
    assert_same(evicted, want)
    assert evicted.counters.prefill_tokens > want.counters.prefill_tokens

    in_chunks = new_engine(name, **SIZES)
    in_chunks.chunk_tokens = in_chunks.settings.page_size
    chunked = converse(in_chunks, stop=stop, evict=True)
    assert_same(chunked, want)
    assert in_chunks.longest_prefill() < in_chunks.max_sequence_tokens
    assert chunked.counters.prefills == evicted.counters.prefills

    small = converse(make(name, **SIZES, num_slots=3, num_pages=6), stop=stop)
    assert_same(small, want)
    assert small.counters.prefill_tokens > want.counters.prefill_tokens

    assert_same(converse(engine, stop=stop, wait=3), want)
    assert_same(converse(make(name, **SIZES, num_slots=2), stop=stop), want)
    assert_same(converse(engine, PROMPTS[:1], stop=stop), want)


def test_an_episode_is_the_same_on_two_devices() -> None:
    on_one = converse(make("qwen2", **SIZES))

    on_two = converse(make("qwen2", (2, 1), **SIZES))

    assert_same(on_two, on_one)
    assert on_two.tokens.keys() == on_one.tokens.keys()


def test_an_episode_that_waits_gives_way() -> None:
    """All others end before the episode whose reply does not come, in fewer slots than episodes."""
    engine = make("qwen2", **SIZES, num_slots=2)
    want = converse(engine)
    key = next(key for key, turns in want.turns.items() if len(turns) == 3 and key[0] == 0)

    got = converse(engine, withheld=key)

    assert_same(got, want)
    assert got.order[-2:] == [key, key]
    assert got.order.index(key) < 4


def test_as_many_waiting_episodes_give_way_as_others_need() -> None:
    """Slots do not stay idle where no reply comes: the calls are those of replies at once."""
    engine = make("qwen2", **SIZES, num_slots=4)
    groups = 16 // 2

    def calls(hold_replies: bool) -> int:
        scheduler = Scheduler(engine, params_on(engine), text_of)
        in_grading: list[Sequence] = []

        def poll_replies(must_wait: bool) -> list[Reply]:
            if hold_replies and not must_wait:
                return []
            replies: list[Reply] = [(sequence, None) for sequence in in_grading]
            in_grading.clear()
            return replies

        prompts = [PROMPTS[number % len(PROMPTS)] for number in range(groups)]
        ended = 0
        for sequence in scheduler.run(
            make_groups(prompts, 2, 6), 2, 0.7, seed_on(engine), poll_replies=poll_replies
        ):
            in_grading.append(sequence)
            ended += 1
        assert ended == 2 * groups
        assert_empty(engine)
        return scheduler.counters.decode_calls

    # Each of four waves of episodes may wait for its patience.
    assert calls(hold_replies=True) <= calls(hold_replies=False) + 4 * PATIENCE


def test_programs_are_planned_as_they_run() -> None:
    """What is compiled ahead of time takes what `generate` is called with."""
    engine = make("qwen2", **SIZES)
    converse(engine, PROMPTS[:1])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params_on(engine)
    )

    program, arguments = abstract_calls(engine, abstract, [])["generate"]

    assert program is engine.jitted.generate
    assert len(arguments) == 8
    program.lower(*arguments)


# -- environments ----------------------------------------------------------------------------------


def test_tasks_reply_to_wrong_responses() -> None:
    right = ("7", Grade(1.0, True, ""))
    wrong = ("3", Grade(0.0, False, ""))
    task = config.TaskConfig(feedback=turns.Feedback(wrong="Nope."), template="plain")
    for name in ("math_multiturn", "countdown"):
        reply = TASKS[name].reply
        assert reply is not None
        assert reply({}, [wrong], task) == "Nope."
        assert reply({}, [wrong, right], task) == config.TaskConfig().feedback.right


def test_the_guessing_game_gives_hints() -> None:
    task = config.TaskConfig(name="guess", options=("value_max=9",), template="plain")
    grades = [guess.grade(text, 7, task).correct for text in ("7", " 7\n", "07", "7 8", "-7", "")]
    assert grades == [True] * 3 + [False] * 3

    wrong = Grade(0.0, False, "")
    hints = [guess.reply(7, [(text, wrong)], task) for text in ("3", "9", "x")]
    assert hints == ["higher", "lower", "no number"]
    assert guess.reply(7, [("3", wrong), ("7", Grade(1.0, True, ""))], task) is None


def test_the_guessing_game_asks_for_every_number_equally_often() -> None:
    task = config.TaskConfig(name="guess", options=("value_max=9",), template="plain")
    golds = [problem.gold for problem in guess.eval_problems(task, 18)]
    assert sorted(golds) == sorted([*range(1, 10)] * 2)
    assert golds[:9] != golds[9:]

    text, response = guess.example(task, 0, 3, 3.0)
    assert text.startswith("1-9\n")
    assert 1 <= int(response) <= 9


def test_the_pool_asks_for_a_reply_only_if_a_turn_may_follow() -> None:
    cases = {
        "math_multiturn": ("\\boxed{3}", {"answer": "4", "question": ""}),
        "countdown": ("x", {"numbers": [1, 2], "target": 3}),
    }
    with Pool(1) as pool:
        for name, (response, gold) in cases.items():
            task = config.TaskConfig(
                name=name, feedback=turns.Feedback(wrong="Nope."), template="qwen_math"
            )
            pool.step(name, TurnRequest(name, response, gold, task, is_last=False))
            pool.step((name, "last"), TurnRequest(name, response, gold, task))
        grades = dict(pool.drain())
    replies = {key: grade.reply for key, grade in grades.items() if grade.reply}
    assert replies == dict.fromkeys(cases, "Nope.")


# -- the rest --------------------------------------------------------------------------------------


def test_turns_cross_hosts() -> None:
    rollouts = list(played())

    got = rollouts_from_bytes([rollouts_to_bytes(rollouts[:8]), rollouts_to_bytes(rollouts[8:])])

    for one, other in zip(got, rollouts, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.tokens.to_dict(), other.tokens.to_dict())
        assert (one.problem, one.sample_index) == (other.problem, other.sample_index)
    assert [rollout.turns for rollout in got] == [rollout.turns for rollout in rollouts]
    assert [rollout.grade for rollout in got] == [rollout.grade for rollout in rollouts]


def test_trajectories_hold_every_turn(tmp_path: Path) -> None:
    rollouts = [
        replace(rollout, problem=replace(rollout.problem, id="guess/train/0"))
        for rollout in played()[:4]
    ]

    trajectories.write_trajectories(tmp_path / "trajectories", rollouts)

    lines = (tmp_path / "trajectories/5/guess_train_0.jsonl").read_text().splitlines()
    for line, rollout in zip(lines, rollouts, strict=True):
        row = json.loads(line)
        assert (row["version_head"], row["version_tail"], row["prompt_length"]) == (5, 5, 4)
        success = [turn["success"] for turn in row["turns"]]
        assert success == [grade_of(turn).correct for turn in rollout.turns]
        assert row["answer_length"] == rollout.tokens.sampled.sum()
        assert sum(turn["answer_length"] for turn in row["turns"]) == row["answer_length"]
        starts = [turn["prompt_length"] for turn in row["turns"]]
        assert starts == [turn.start for turn in rollout.turns]
    text = (tmp_path / "trajectories/5/guess_train_0.txt").read_text()
    assert text.count("--- turn") == sum(len(rollout.turns) for rollout in rollouts)
    assert "--- reply\n" in text


def test_a_task_without_replies_is_refused(tmp_path: Path) -> None:
    settings = tiny_settings(task={"name": "gsm8k", "template": "qwen_math", "options": ()})
    with pytest.raises(ValueError, match="task.name=gsm8k has no replies in"):
        setup.check(settings, tmp_path)


def test_an_episode_must_have_room_for_a_turn() -> None:
    message = "rollout.max_episode_tokens=10 is shorter than a prompt and a response, 11"
    with pytest.raises(ValueError, match=message):
        tiny_settings(rollout={"max_episode_tokens": 10, "max_new_tokens": 3})
    message = "train.pack=20 has no room for the 30 tokens that may follow a prompt"
    with pytest.raises(ValueError, match=message):
        tiny_settings(train={"pack": "20"})


def test_a_run_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    def train_in(name: str, num_steps: int) -> None:
        settings = tiny_settings(train={"steps": num_steps, "logged_rollouts": 2})
        rl.train(settings, tmp_path / name)

    train_in("whole", 4)
    train_in("resumed", 2)
    train_in("resumed", 4)

    whole = rows_without_timing(tmp_path / "whole")
    assert len(whole) == 4
    assert all(row["turns/mean"] > 1 for row in whole)
    assert rows_without_timing(tmp_path / "resumed") == whole
    weights = {
        name: (tmp_path / name / "export-4/model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    }
    assert weights["resumed"] == weights["whole"]
    written = {
        name: sorted(path.name for path in (tmp_path / name / "trajectories").rglob("*"))
        for name in ("whole", "resumed")
    }
    assert written["resumed"] == written["whole"]
    assert "guess_train_4.txt" in written["whole"]


def rows_without_timing(workdir: Path) -> list[dict]:
    """Returns the metrics of a run without those that depend on when a reply came.

    A token's log-prob has other last digits in a prefill than in a decode step, and whether an
    episode is prefilled again depends on when its reply came.
    """
    timed = ("rollout/slot_utilization", "policy/mismatch", "policy/effective_samples")
    rows = []
    for row in runs.timeless(workdir / "metrics.jsonl"):
        rows.append(
            {name: value for name, value in row.items() if not name.startswith(("eval", *timed))}
        )
    return rows
