"""The reward `judge`: what a judge is asked, what its replies mean, and how it fails."""

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jzero.config import JudgeServer, RewardConfig, TaskConfig
from jzero.errors import UserError
from jzero.rewards import rewards
from jzero.rollout.turns import make_request
from jzero.types import Grade, Problem
from jzero.workers import judge
from jzero.workers.pool import Pool

Answer = Callable[[dict], tuple[int, str]]  # a request -> the status, and the judge's words

PROBLEM = Problem("1", "math", "What is 4 + 3?", {"answer": "7", "question": "4 + 3?"}, {"hint": 4})


@contextlib.contextmanager
def served(answer: Answer) -> Iterator[str]:
    """Serves chat completions with the words of `answer`; yields the address of the API."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Prints nothing."""

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            request["authorization"] = self.headers["Authorization"]
            status, words = answer(request)
            reply = {"choices": [{"message": {"role": "assistant", "content": words}}]}
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def settings(url: str, **changes: object) -> TaskConfig:
    asked = JudgeServer(url=url, model="wise", **changes)
    reward = RewardConfig(("accuracy", "judge"), judge=asked)
    rewards.check_rewards(reward)
    return TaskConfig(name="math", options=("answer_mark=answer",), reward=reward)


def judged(task: TaskConfig, *responses: str, cache: Path | None = None) -> dict[str, Grade]:
    """Returns the grades of responses to PROBLEM, from one grader process."""
    with Pool(1, cache) as pool:
        for response in responses:
            pool.step(response, make_request(PROBLEM, 0, response, (), task, is_last=True))
        return {str(key): grade for key, grade in pool.drain()}


def test_the_judges_score_is_a_reward_beside_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_JUDGE", "secret")
    requests = []

    def answer(request: dict) -> tuple[int, str]:
        requests.append(request)
        return 200, "Score: 2 would be low. It is right.\nScore: 7.5"

    with served(answer) as url:
        task = settings(url, key_variable="KEY_OF_JUDGE")
        grade = judged(task, "7")["7"]
    [summed] = rewards.add_batch_rewards([grade], [1], [1], task.reward)

    assert grade.correct and not grade.failed
    assert summed.parts == {"accuracy": 1.0, "judge": 0.75}
    assert summed.score == 1.75
    [request] = requests
    assert request["authorization"] == "Bearer secret"
    assert request["model"] == "wise" and request["temperature"] == 0.0
    [message] = request["messages"]
    assert "What is 4 + 3?" in message["content"] and "<response>\n7\n<" in message["content"]


def test_requests_wait_together_and_not_in_grader_processes() -> None:
    together = threading.Barrier(4)

    def answer(request: dict) -> tuple[int, str]:
        together.wait(timeout=60)  # raises unless four requests are here at the same time
        return 200, "Score: 10"

    with served(answer) as url:
        grades = judged(settings(url, concurrency=4, retries=0), "4", "5", "6", "7")
    assert [grades[response].parts for response in "4567"] == [{"judge": 1.0}] * 4


@pytest.mark.usefixtures("quick_retries")
def test_a_judge_that_is_busy_is_asked_again() -> None:
    statuses = iter([503, 200])
    with served(lambda request: (next(statuses), "score 5")) as url:
        assert judged(settings(url, retries=1), "7")["7"].parts == {"judge": 0.5}


@pytest.mark.parametrize(
    "status, words, reason",
    [
        (401, "Score: 5", r"error: judge: .*judge\.url=http.*status 401"),
        (200, "It is good.", r"error: judge: no score in the judge's reply It is good\."),
        (200, "Score: 11", "error: judge: the judge's score 11 is not in 0..task.reward.judge"),
    ],
)
def test_a_judge_without_a_score_fails_at_once_and_loudly(
    status: int, words: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    requests = []

    def answer(request: dict) -> tuple[int, str]:
        requests.append(request)
        return status, words

    with served(answer) as url:
        grade = judged(settings(url), "7")["7"]
    assert grade.failed and grade.known_score is None and grade.correct
    assert re.match(reason, grade.reason), grade.reason
    assert len(requests) == 1
    assert "judge failed (shown once)" in capfd.readouterr().err


def test_a_judge_that_is_not_there_fails() -> None:
    with served(lambda request: (200, "")) as url:
        pass
    grade = judged(settings(url, retries=0), "7")["7"]
    assert grade.failed and "refused" in grade.reason


def test_what_the_judge_said_is_not_asked_again(tmp_path: Path) -> None:
    cache = tmp_path / "run" / "judge.jsonl"
    asked = []

    def answer(request: dict) -> tuple[int, str]:
        asked.append(request["messages"][0]["content"])
        return 200, f"Score: {len(asked)}"

    with served(answer) as url:
        first = judged(settings(url), "7", cache=cache)
        with cache.open("a", encoding="utf-8") as file:
            file.write('{"key": "cut')  # the run was killed while it wrote
        again = judged(settings(url, scale=5.0), "7", "8", cache=cache)
        last = judged(settings(url), "8", cache=cache)
    assert len(asked) == 2
    assert first["7"].parts["judge"] == 0.1
    assert again["7"].parts["judge"] == 0.2  # the reply is kept, and read with today's scale
    assert last["8"].parts["judge"] == 0.2


def test_a_rubric_is_filled_once(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text(
        '{"a": {b}} {gold.answer} {row.hint} {response} | {conversation}', encoding="utf-8"
    )
    asked = JudgeServer(url="http://here", model="m", template=str(rubric))
    task = TaskConfig(reward=RewardConfig(("judge",), judge=asked))
    earlier = [("5", Grade(0.0, False, "", reply="no"))]
    response = "{gold.answer} {prompt}"

    episode = make_request(PROBLEM, 0, response, earlier, task, is_last=True).values
    message = judge.fill_rubric(asked, response, PROBLEM.gold, episode)

    assert set(episode) == {"row", "messages"}
    assert message == (
        '{"a": {b}} 7 4 {gold.answer} {prompt} | user: What is 4 + 3?\n\nassistant: 5\n\n'
        "user: no\n\nassistant: {gold.answer} {prompt}"
    )
    without_row = Problem("2", "math", "1?", {"answer": "1"})
    with pytest.raises(UserError, match=re.escape("row.hint, and this problem has none")):
        episode = make_request(without_row, 0, "1", (), task, is_last=True).values
        judge.fill_rubric(asked, "1", without_row.gold, episode)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"url": ""}, "task.reward.judge.url is empty"),
        ({"url": "localhost:8000"}, "is not a server address: use http://HOST:PORT"),
        ({"model": ""}, "task.reward.judge.model is empty"),
        ({"key_variable": "NOBODY_HAS_THIS"}, "NOBODY_HAS_THIS is not set in the environment"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"pattern": "[0-9]+"}, "has 0 groups"),
        ({"template": "absent/rubric.txt"}, "absent/rubric.txt cannot be read"),
    ],
)
def test_impossible_settings_of_a_judge_are_refused(changes: dict, message: str) -> None:
    asked = JudgeServer(**{"url": "http://here", "model": "m", **changes})
    with pytest.raises(UserError, match=message):
        rewards.check_rewards(RewardConfig(("judge",), judge=asked))


def test_a_judge_that_no_reward_asks_is_refused() -> None:
    asked = JudgeServer(url="http://here", model="m")
    with pytest.raises(UserError, match="add judge to task.reward.functions"):
        rewards.check_rewards(RewardConfig(judge=asked))


def test_a_rubric_without_the_response_is_refused(tmp_path: Path) -> None:
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("Is {gold} right?", encoding="utf-8")
    asked = JudgeServer(url="http://here", model="m", template=str(rubric))
    with pytest.raises(UserError, match="does not hold the response"):
        rewards.check_rewards(RewardConfig(("judge",), judge=asked))
