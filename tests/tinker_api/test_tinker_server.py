"""The server over HTTP: training, sampling, checkpoints, faults, tenants and limits."""

import gzip
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from tinker_client import CONTEXT, NAME, Client, logprobs_of, loss_of, sampled_of

from benchmarks.tinker.scripted_loop import datum, tensor
from jzero.model import peft, tokenizer
from jzero.tinker import datums, wire
from jzero.tinker.service import Service

PROMPT = [72, 101, 108, 108, 111]
TEXTS = [[72, 101, 108, 108, 111, 32, 119], list(range(30, 60)), [9, 8, 7]]
DATA = [datum(ids) for ids in TEXTS]


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


# -- exactness -------------------------------------------------------------------------------------


def test_sample_forward_and_prompt_log_probs_are_the_same_bits(client) -> None:
    client.train(DATA)
    sampler = client.snapshot()

    sampled = client.sample(sampler, PROMPT, num_samples=3, max_tokens=12)

    for tokens, logps in zip(sampled.tokens, sampled.logprobs, strict=True):
        ids = [*PROMPT, *tokens]
        (forward,) = client.forward([datum(ids)])
        np.testing.assert_array_equal(forward[-len(tokens) :], logps)
        scored = client.sample(sampler, ids, max_tokens=1, prompt_logprobs=True)
        prompt = np.frombuffer(scored.message["prompt_logprobs"], "<f4")
        assert np.isnan(prompt[0])
        np.testing.assert_array_equal(prompt[1:], forward)
        # The gradient's program computes them, too.
        (again,) = logprobs_of(client.result(client.send([datum(ids)])))
        np.testing.assert_array_equal(again, forward)


def test_samples_of_one_prompt_have_the_same_bits_together_and_alone(client, service) -> None:
    """Together they share the rows' prefix, which changes no bit of a log-prob."""
    client.train(DATA)
    prompt = list(range(30, 71))
    sampled = client.sample(client.snapshot(), prompt, num_samples=8, max_tokens=8)
    data = []
    for tokens, logps in zip(sampled.tokens, sampled.logprobs, strict=True):
        before = np.zeros(len(prompt) - 1)
        inputs = {
            "logprobs": tensor(np.concatenate([before, logps])),
            "advantages": tensor(np.concatenate([before, np.ones(len(tokens))])),
        }
        data.append(datum([*prompt, *tokens], **inputs))
    fields = {"loss_fn": "importance_sampling"}

    together = client.forward(data, **fields)

    call = datums.read_batch(
        {"data": data, **fields}, vocabulary=10_000, longest=CONTEXT, limits=service.limits
    )
    lengths = datums.row_lengths(CONTEXT)
    assert datums.plan_rows(call.data, lengths).layout.prefix == 64
    for one, found, logps in zip(data, together, sampled.logprobs, strict=True):
        np.testing.assert_array_equal(found[-len(logps) :], logps)
        assert same(client.forward([one], **fields), [found])
    assert same(client.train(data, **fields), together)


def test_training_does_not_change_a_snapshot_and_neither_does_its_place(client) -> None:
    sampler = client.snapshot()
    before = client.sample(sampler, PROMPT, num_samples=2)
    for _ in range(3):
        client.train(DATA)
    others = [client.snapshot() for _ in range(3)]  # two fit: the first goes to the host
    for other in others:
        assert client.sample(other, PROMPT).tokens
    after = client.sample(sampler, PROMPT, num_samples=2)

    assert after.tokens == before.tokens and same(after.logprobs, before.logprobs)
    assert not same(client.sample(others[0], PROMPT, num_samples=2).logprobs, before.logprobs)


def test_two_tenants_are_as_they_are_alone(url) -> None:
    """Ranks 4 and 8 train and sample at the same time; one state is on the device at a time."""

    def live(client: Client, rank: int, results: dict[int, tuple]) -> None:
        client.begin(rank=rank, seed=rank)
        logps = [client.train(DATA) for _ in range(2)]
        sampler = client.snapshot()
        sampled = client.sample(sampler, PROMPT, num_samples=2)
        results[rank] = logps, sampled.tokens, sampled.logprobs
        client.http.post(f"sessions/{client.session}/finish", json={})

    alone: dict[int, tuple] = {}
    together: dict[int, tuple] = {}
    for rank in (4, 8):
        live(Client(url), rank, alone)
    threads = [
        threading.Thread(target=live, args=(Client(url, key), rank, together))
        for rank, key in ((4, "tml-ann"), (8, "tml-bob"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for rank in (4, 8):
        for left, right in zip(alone[rank][0], together[rank][0], strict=True):
            assert same(left, right)
        assert alone[rank][1] == together[rank][1]
        assert same(alone[rank][2], together[rank][2])


def test_two_tenants_that_train_and_sample_at_once_have_no_mismatch(url) -> None:
    """The cookbook's metrics kl_sample_train_v1 and _v2 of three RL steps are exactly 0."""

    def live(client: Client, rank: int, mismatches: list[float]) -> None:
        client.begin(rank=rank, seed=rank)
        for step in range(3):
            sampler = client.snapshot()
            sampled = client.sample(sampler, PROMPT, num_samples=4, seed=step)
            data = []
            for number, (tokens, logps) in enumerate(
                zip(sampled.tokens, sampled.logprobs, strict=True)
            ):
                before = np.zeros(len(PROMPT) - 1)
                advantages = np.full(len(tokens), 1.5 - number)
                inputs = {
                    "logprobs": tensor(np.concatenate([before, logps])),
                    "advantages": tensor(np.concatenate([before, advantages])),
                }
                data.append(datum([*PROMPT, *tokens], **inputs))
            trained = client.train(data, loss_fn="importance_sampling")
            gaps = [
                logps - row[-len(logps) :]
                for logps, row in zip(sampled.logprobs, trained, strict=True)
            ]
            gap = np.concatenate(gaps)
            mismatches += [float(gap.mean()), float(0.5 * (gap**2).mean())]
        client.http.post(f"sessions/{client.session}/finish", json={})

    found: list[float] = []
    with ThreadPoolExecutor(2) as threads:
        clients = [(Client(url, key), rank) for key, rank in (("tml-ann", 4), ("tml-bob", 6))]
        lives = [threads.submit(live, client, rank, found) for client, rank in clients]
        for one in lives:
            one.result()

    assert found == [0.0] * 12


# -- sampling --------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_and_no_seed_others(client) -> None:
    sampler = client.sampler(base_model=NAME)
    first = client.sample(sampler, PROMPT, num_samples=3)
    assert first.tokens == client.sample(sampler, PROMPT, num_samples=3).tokens
    assert first.tokens[0] != first.tokens[1]
    without = [client.sample(sampler, PROMPT, seed=None).tokens for _ in range(2)]
    assert without[0] != without[1]


def test_stops_end_a_sample_and_belong_to_it(client, service) -> None:
    sampler = client.sampler(base_model=NAME)
    (free,) = client.sample(sampler, PROMPT, stop=[]).tokens
    assert len(free) == 8
    by_id = client.sample(sampler, PROMPT, stop=[free[3]])
    assert by_id.tokens == [free[: free.index(free[3]) + 1]] and by_id.stops == [wire.STOP]
    text = tokenizer.decode(service.tenants.base.tokenizer, free[:4])
    by_text = client.sample(sampler, PROMPT, stop=[text])
    assert by_text.tokens[0] == free[:4] and by_text.stops == [wire.STOP]


def test_filters_belong_to_a_request(client) -> None:
    sampler = client.sampler(base_model=NAME)
    greedy = client.sample(sampler, PROMPT, temperature=0)
    only_one = client.sample(sampler, PROMPT, top_k=1)
    assert greedy.tokens == only_one.tokens


def test_top_log_probs_are_those_of_the_tokens(client) -> None:
    sampler = client.sampler(base_model=NAME)
    sampled = client.sample(
        sampler, PROMPT, temperature=0, topk_prompt_logprobs=3, topk_sample_logprobs=2
    )
    prompt = sampled.message["topk_prompt_logprobs"]
    assert (prompt["k"], prompt["length"]) == (3, len(PROMPT))
    assert np.frombuffer(prompt["logprobs"], "<f4")[:3].tolist() == [-99999.0] * 3
    (sequence,) = sampled.message["sequences"]
    top = sequence["topk_sampled_logprobs"]
    best = np.frombuffer(top["token_ids"], "<i4").reshape(-1, 2)[:, 0]
    assert best.tolist() == sampled.tokens[0]
    logps = np.frombuffer(top["logprobs"], "<f4").reshape(-1, 2)[:, 0]
    np.testing.assert_allclose(logps, sampled.logprobs[0], rtol=1e-5)


def values_of(message: wire.Message) -> np.ndarray:
    return wire.dense("answer", message)


def test_named_tokens_of_a_prompt_have_the_bits_of_forward(client) -> None:
    client.train(DATA)
    sampler, ids = client.snapshot(), TEXTS[0]
    named = np.full((len(ids) - 1, 3), -1)
    named[2], named[5, 1] = [7, 200, 0], ids[6]
    kept = np.maximum(named, 0)
    weights = tensor(np.ones(named.shape))
    (expected,) = client.forward([datum(ids, target_tokens=tensor(kept, "<i8"), weights=weights)])
    expected = np.where(named >= 0, expected, 0)
    body = {"data": named.ravel().tolist(), "dtype": "int64", "shape": [*named.shape]}

    dense = client.sample(sampler, ids, max_tokens=1, target_prompt_logprobs=body)
    both = client.sample(
        sampler, ids, max_tokens=1, target_prompt_logprobs=body, prompt_logprobs=True
    )

    for answer in (dense, both):
        found = answer.message["target_prompt_logprobs"]
        np.testing.assert_array_equal(values_of(found), expected)
    prompt = np.frombuffer(both.message["prompt_logprobs"], "<f4")
    assert prompt[6] == expected[5, 1], "the prompt's own token"

    rows, columns = np.nonzero(named >= 0)
    csr = {
        "data": named[rows, columns].tolist(),
        "dtype": "int64",
        "shape": [*named.shape],
        "sparse_crow_indices": np.searchsorted(rows, np.arange(len(ids))).tolist(),
        "sparse_col_indices": columns.tolist(),
    }
    sparse = client.sample(sampler, ids, max_tokens=1, target_prompt_logprobs=csr)
    found = sparse.message["target_prompt_logprobs"]
    assert "sparse_csr" in found
    np.testing.assert_array_equal(values_of(found), expected)


def test_drawn_tokens_of_a_prompt_have_the_bits_of_forward(client) -> None:
    sampler, ids = client.sampler(base_model=NAME), TEXTS[0]

    def draw(**more: object) -> tuple[np.ndarray, np.ndarray]:
        answer = client.sample(sampler, ids, max_tokens=1, prompt_alt_tokens_k=4, **more)
        drawn = answer.message["prompt_alt_tokens"]
        return values_of(drawn["tokens"]), values_of(drawn["logprobs"])

    tokens, logps = draw(temperature=0.7)

    assert tokens.shape == logps.shape == (len(ids) - 1, 4)
    weights = tensor(np.ones(tokens.shape))
    (expected,) = client.forward([datum(ids, target_tokens=tensor(tokens, "<i8"), weights=weights)])
    np.testing.assert_array_equal(logps, expected)
    assert len(np.unique(tokens)) > 4
    np.testing.assert_array_equal(draw(temperature=0.7)[0], tokens)
    assert not np.array_equal(draw(temperature=0.7, seed=6)[0], tokens)
    greedy = draw(temperature=0)
    top = client.sample(sampler, ids, max_tokens=1, topk_prompt_logprobs=1)
    best = np.frombuffer(top.message["topk_prompt_logprobs"]["token_ids"], "<i4")
    np.testing.assert_array_equal(greedy[0], np.repeat(best[1:, None], 4, axis=1))


def test_the_last_log_probs_of_a_prompt_are_those_of_the_whole(client) -> None:
    sampler, ids = client.sampler(base_model=NAME), TEXTS[0]
    wanted = {"max_tokens": 1, "prompt_logprobs": True, "topk_prompt_logprobs": 1}
    whole = client.sample(sampler, ids, **wanted).message
    last = client.sample(sampler, ids, **wanted, prompt_logprobs_last_n=2).message

    logps = np.frombuffer(last["prompt_logprobs"], "<f4")
    assert np.isnan(logps[:-2]).all()
    np.testing.assert_array_equal(logps[-2:], np.frombuffer(whole["prompt_logprobs"], "<f4")[-2:])
    top, all_top = last["topk_prompt_logprobs"], whole["topk_prompt_logprobs"]
    assert top["length"] == len(ids)
    assert np.frombuffer(top["logprobs"], "<f4")[:-2].tolist() == [-99999.0] * (len(ids) - 2)
    assert top["token_ids"][-8:] == all_top["token_ids"][-8:]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"data": [1.5] * 4, "dtype": "float32", "shape": [4, 1]}, "send int64"),
        ({"data": [1] * 3, "dtype": "int64", "shape": [3, 1]}, "not [4, K]"),
        ({"data": [1] * 4, "dtype": "int64", "shape": [4]}, "not [4, K]"),
        ({"data": [1] * 7, "dtype": "int64", "shape": [4, 2]}, "do not fill"),
        ({"data": [1, 1, 1, 10**6], "dtype": "int64", "shape": [4, 1]}, "token outside"),
        ({"data": [1, 1, 1, -2], "dtype": "int64", "shape": [4, 1]}, "token outside"),
        ({"data": [1, 1, 1, 2**70], "dtype": "int64", "shape": [4, 1]}, "not an int64"),
        ({"data": [-1] * 4, "dtype": "int64", "shape": [4, 1]}, "names no token"),
        ({"data": [1] * 20, "dtype": "int64", "shape": [4, 5]}, "at most 4 (--max-targets)"),
        (
            {
                "data": [1],
                "dtype": "int64",
                "shape": [4, 2],
                "sparse_crow_indices": [0, 0, 0, 0, 1],
                "sparse_col_indices": [2],
            },
            "indices do not fit",
        ),
    ],
)
def test_named_tokens_that_do_not_fit_the_prompt_are_refused(client, body, reason) -> None:
    sampler = client.sampler(base_model=NAME)
    refused = client.ask(sampler, PROMPT, 1, target_prompt_logprobs=body)
    assert refused.status_code == 400 and reason in refused.text, refused.text
    too_many = client.ask(sampler, PROMPT, 2, prompt_alt_tokens_k=5)
    assert too_many.status_code == 400 and "--max-targets" in too_many.text


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_loaded_checkpoint_goes_on_to_the_bit(client) -> None:
    client.train(DATA)
    promise = client.command("save_weights", path="a", user_metadata={"x": "y"})
    path = client.done(promise)["path"]
    assert path == f"tinker://{client.model}/weights/a"
    loaded = Client(client.url)
    loaded.session = client.session
    promise = loaded.post(
        "load_weights", session_id=client.session, model_seq_id=1, path=path, optimizer=True
    )
    loaded.model = loaded.done(promise)["model_id"]

    for _ in range(2):
        assert same(client.train(DATA), loaded.train(DATA))
    assert same(client.forward(DATA), loaded.forward(DATA))

    # Into an existing model, and without the optimizer: the weights of then, and a first step.
    promise = loaded.command("load_weights", path=path, optimizer=False)
    loaded.done(promise)
    assert not same(client.forward(DATA), loaded.forward(DATA))
    record = client.http.get(f"training_runs/{client.model}?access_scope=owned").json()
    assert record["last_checkpoint"]["user_metadata"] == {"x": "y"}


def test_weights_for_samplers_are_sampled_by_path_and_load_as_peft(
    client, service, tmp_path
) -> None:
    client.train(DATA)
    snapshot = client.snapshot()
    promise = client.command("save_weights_for_sampler", path="s")
    path = client.done(promise)["path"]
    by_path = client.sampler(model_path=path)

    found, expected = (client.sample(one, PROMPT, num_samples=2) for one in (by_path, snapshot))

    assert found.tokens == expected.tokens and same(found.logprobs, expected.logprobs)
    info = client.post("weights_info", tinker_path=path).json()
    parts = [info[f"train_{part}"] for part in ("unembed", "mlp", "attn")]
    assert (info["lora_rank"], parts) == (4, [True, True, True])
    promise = client.command("save_weights_external", path="e")
    external = client.done(promise)
    assert external["size_bytes"] > 0
    links = client.http.get(
        f"training_runs/{client.model}/checkpoints/external_weights/e/external_weights_urls"
    ).json()
    for name, link in links["urls"].items():
        (tmp_path / name).write_bytes(httpx.get(link).content)
    settings = peft.read_settings(tmp_path, service.tenants.base.model)
    assert settings.rank == 4
    adapter = peft.load(tmp_path, service.tenants.base.model, settings)
    assert np.any(adapter["lm_head"]["b"]), "the output layer is trained"


def test_the_parts_of_an_adapter_are_those_of_the_client(client) -> None:
    client.begin(1, train_unembed=False, train_attn=False)
    promise = client.command("save_weights", path="m")
    path = client.done(promise)["path"]
    info = client.post("weights_info", tinker_path=path).json()
    assert [info[f"train_{part}"] for part in ("unembed", "mlp", "attn")] == [False, True, False]
    nothing = {"train_mlp": False, "train_attn": False, "train_unembed": False}
    refused = client.post(
        "create_model",
        session_id=client.session,
        model_seq_id=2,
        base_model=NAME,
        lora_config={"rank": 4, **nothing},
    )
    assert refused.status_code == 400 and "train_unembed" in refused.text


def test_the_output_layer_alone_is_trained_and_sampled(client) -> None:
    before = client.forward(DATA)
    client.begin(1, train_mlp=False, train_attn=False)
    assert same(client.forward(DATA), before), "untrained adapters change nothing"

    client.train(DATA)

    after = client.forward(DATA)
    assert sum(logps.sum() for logps in after) > sum(logps.sum() for logps in before)
    sampled = client.sample(client.snapshot(), PROMPT, max_tokens=4)
    (forward,) = client.forward([datum([*PROMPT, *sampled.tokens[0]])])
    np.testing.assert_array_equal(forward[-4:], sampled.logprobs[0])


def test_checkpoints_are_listed_expire_and_are_deleted(client) -> None:
    promise = client.command("save_weights", path="a", ttl_seconds=3600)
    client.done(promise)
    run = f"training_runs/{client.model}/checkpoints"
    (listed,) = client.http.get(run).json()["checkpoints"]
    assert listed["checkpoint_id"] == "weights/a" and listed["expires_at"]
    assert client.http.put(f"{run}/weights/a/ttl", json={"ttl_seconds": None}).status_code == 200
    assert client.http.get(run).json()["checkpoints"][0]["expires_at"] is None
    again = client.command("save_weights", path="a")
    assert client.result(again).json()["category"] == "user"
    assert client.http.delete(f"{run}/weights/a").status_code == 200
    assert client.http.get(run).json()["checkpoints"] == []
    assert client.http.delete(f"{run}/weights/a").status_code == 404


# -- faults ----------------------------------------------------------------------------------------


def test_reordered_and_repeated_commands_run_once_in_order(url) -> None:
    def train(client: Client, order: list[int], repeats: int) -> list[np.ndarray]:
        """Two gradients and a step, sent in an order, each `repeats` times."""
        client.begin()
        promises: dict[int, str] = {}
        for number in order:
            for _ in range(repeats):
                if number == 3:
                    answer = client.step(seq_id=3)
                else:
                    answer = client.send([DATA[number]], seq_id=number)
                found = answer.json()["request_id"]
                assert promises.setdefault(number, found) == found
        client.seq_id = 3
        logps = client.forward(DATA)
        client.http.post(f"sessions/{client.session}/finish", json={})
        return logps

    expected = train(Client(url), [1, 2, 3], 1)
    assert same(train(Client(url), [2, 3, 1], 1), expected)
    assert same(train(Client(url), [3, 2, 1], 3), expected)


def test_a_refused_command_is_no_hole(client) -> None:
    before = client.forward(DATA)
    assert client.send(DATA, loss_fn="stable_reinforce").status_code == 400
    assert client.send([datum([1, 10**6])]).status_code == 400
    wrong = client.command("optim_step", adam_params=3)
    assert wrong.status_code == 422
    dimuon = client.command("optim_step")
    assert dimuon.status_code == 400
    assert same(client.forward(DATA), before)


def test_a_lost_command_fails_those_that_wait_for_it_and_no_others(client) -> None:
    before = client.forward(DATA)
    client.next()  # never sent
    orphan = client.result(client.step())
    assert orphan.json()["category"] == "server" and "never arrived" in orphan.json()["error"]
    assert same(client.forward(DATA), before)


# A step within the bounds of every field that overflows: the update is a decay of 1e6 times the
# adapter, again and again.
OVERFLOWING = {"learning_rate": 1e3, "weight_decay": 1e3}


def test_a_step_that_overflows_is_refused_and_the_adapter_stays(client, url) -> None:
    client.train(DATA)
    before = client.forward(DATA)
    other = Client(url, "tml-bob").begin()
    sampler = other.sampler(base_model=NAME)
    alone = other.sample(sampler, PROMPT)

    def step() -> dict:
        body = {"model_id": client.model, "seq_id": client.next(), "adam_params": OVERFLOWING}
        return client.result(client.post("optim_step", **body)).json()

    refused = next(answer for answer in (step() for _ in range(20)) if "error" in answer)

    assert "learning_rate=1000" in refused["error"] and refused["category"] == "user"
    after = client.forward(DATA)
    assert not same(after, before), "the steps before it were done"
    assert "error" in step()
    # A huge adapter overflows in its own rows, but it is the one from before the step.
    for left, right in zip(client.forward(DATA), after, strict=True):
        np.testing.assert_array_equal(left, right)
    client.sample(client.snapshot(), PROMPT)
    together = other.sample(sampler, PROMPT)
    assert together.tokens == alone.tokens and same(together.logprobs, alone.logprobs)
    other.http.post(f"sessions/{other.session}/finish", json={})


def test_a_gradient_that_is_not_finite_is_no_step(client) -> None:
    client.train(DATA)
    before = client.forward(DATA)
    ids = TEXTS[0]
    huge = datum(ids, weights=tensor(np.full(len(ids) - 1, 3e38)))
    client.result(client.send([huge, huge]))

    refused = client.result(client.step()).json()

    assert "gradient" in refused["error"]
    assert same(client.forward(DATA), before)
    client.train(DATA)  # the gradient is cleared


def test_a_failed_command_leaves_the_model_usable(client) -> None:
    before = client.forward(DATA)
    promise = client.command("load_weights", path=f"tinker://{client.model}/weights/none")
    assert promise.status_code == 404
    assert same(client.forward(DATA), before)


def test_a_repeated_sample_has_the_first_promise(client) -> None:
    sampler = client.sampler(base_model=NAME)
    first, second = (client.ask(sampler, PROMPT, 1).json() for _ in range(2))
    assert first == second
    assert first["sample_sequence_ids"] == [f"{sampler}:1:0"]
    gone = client.post("retrieve_future", request_id="sample-gone")
    assert gone.status_code == 410
    assert client.post("retrieve_future", request_id="gone").status_code == 404


def test_a_poll_is_held(client, service: Service) -> None:
    model = service.sessions.model("ann", client.model)
    assert model is not None
    promise = client.send(DATA, seq_id=client.seq_id + 2)  # waits for the one before
    started = time.monotonic()
    thread = threading.Thread(target=lambda: (time.sleep(0.5), client.step(seq_id=1)))
    thread.start()
    assert logprobs_of(client.result(promise))
    assert time.monotonic() - started > 0.4
    thread.join()


# -- owners and limits -----------------------------------------------------------------------------


def test_nothing_of_another_key_is_there(client, url) -> None:
    promise = client.command("save_weights", path="a")
    path = client.done(promise)["path"]
    sampler = client.sampler(base_model=NAME)
    request = client.ask(sampler, PROMPT, 1).json()["request_id"]
    other = Client(url, "tml-bob").begin()
    calls = [
        other.post("get_info", model_id=client.model),
        other.post("optim_step", model_id=client.model, seq_id=1, adam_params={}),
        other.post("weights_info", tinker_path=path),
        other.post("load_weights", session_id=other.session, model_seq_id=9, path=path),
        other.post("session_heartbeat", session_id=client.session),
        other.post(
            "create_sampling_session",
            session_id=other.session,
            sampling_session_seq_id=9,
            model_path=path,
        ),
        other.ask(sampler, PROMPT, 2),
        other.http.get(f"training_runs/{client.model}"),
        other.http.delete(f"training_runs/{client.model}/checkpoints/weights/a"),
        other.http.post(f"sessions/{client.session}/finish", json={}),
    ]
    assert [call.status_code for call in calls] == [404] * len(calls)
    assert other.post("retrieve_future", request_id=request).status_code == 410
    other.http.post(f"sessions/{other.session}/finish", json={})
    for key in ("", "tml-eve"):
        assert Client(url, key).post("create_session").status_code == 401
    assert httpx.get(f"{url}/api/v1/healthz").json() == {"status": "ok"}


def test_every_limit_has_its_refusal(client) -> None:
    sampler = client.sampler(base_model=NAME)
    too_long = client.ask(sampler, [1] * CONTEXT, 1)
    assert too_long.status_code == 400 and "--context" in too_long.text
    assert client.ask(sampler, PROMPT, 2, num_samples=9).status_code == 400
    assert client.ask(sampler, [], 3).status_code == 400
    assert client.ask(sampler, [10**6], 4).status_code == 400
    assert client.ask(sampler, PROMPT, 5, topk_prompt_logprobs=21).status_code == 400
    assert client.ask(sampler, PROMPT, 6, max_tokens=0).status_code == 422
    assert client.send([datum([1, 2])] * 65).status_code == 400
    wide = datum([1, 2])
    wide["loss_fn_inputs"] = {"target_tokens": tensor([[1] * 5], "<i8")}
    assert client.send([wide]).status_code == 400
    headers = {"Content-Type": "application/x-protobuf"}
    large = client.http.post("forward_backward", content=bytes(300_000), headers=headers)
    assert large.status_code == 413
    bomb = gzip.compress(bytes(10**7))
    packed = headers | {"Content-Encoding": "gzip"}
    assert client.http.post("forward_backward", content=bomb, headers=packed).status_code == 413
    broken = client.http.post("forward_backward", content=b"\xff" * 9, headers=headers)
    assert broken.status_code == 400
    rank = client.post(
        "create_model",
        session_id=client.session,
        model_seq_id=7,
        base_model=NAME,
        lora_config={"rank": 17},
    )
    assert rank.status_code == 400 and "--max-rank" in rank.text
    other = client.post(
        "create_model",
        session_id=client.session,
        model_seq_id=8,
        base_model="other",
        lora_config={"rank": 4},
    )
    assert other.status_code == 400 and NAME in other.text


def test_one_adapter_too_many_is_refused_and_room_comes_back(client) -> None:
    for number in (1, 2):
        client.begin(number)
    promise = client.post(
        "create_model",
        session_id=client.session,
        model_seq_id=3,
        base_model=NAME,
        lora_config={"rank": 4},
    )
    assert promise.status_code == 429 and "--adapters" in promise.text
    client.http.post(f"sessions/{client.session}/finish", json={})
    client.session = ""
    client.begin()


def test_too_many_samples_come_again_later(client) -> None:
    """A storm: every request is answered in the end, and no more than the limit wait."""
    sampler = client.sampler(base_model=NAME)
    pending, refused = {}, 0
    for number in range(100):
        while (answer := client.ask(sampler, PROMPT, number, max_tokens=4)).status_code == 429:
            assert answer.headers["X-Tinker-Sampling-Backpressure"] == "1"
            refused += 1
            time.sleep(0.05)
        pending[number] = answer
    results = [sampled_of(client.result(answer)).tokens for answer in pending.values()]
    assert len(results) == 100 and all(tokens == results[0] for tokens in results)


def test_negative_weights_and_several_targets_train(client) -> None:
    ids = TEXTS[0]
    (alone,) = client.forward([datum(ids)])
    weights = np.array([-1, 2, 0, 0.5, 1, 1], np.float32)
    weighted = client.result(client.send([datum(ids, weights=tensor(weights))], forward_only=True))
    assert loss_of(weighted) == pytest.approx(-float(weights @ alone), rel=1e-5)
    targets = np.stack([ids[1:], [1] * 6], axis=1)
    both = datum(ids)
    both["loss_fn_inputs"] = {
        "target_tokens": tensor(targets, "<i8"),
        "weights": tensor(np.stack([weights, np.zeros(6)], axis=1)),
    }
    answer = client.result(client.send([both, datum(ids)], forward_only=True))
    first, second = logprobs_of(answer)
    assert first.shape == (6, 2) and second.shape == (6,)
    np.testing.assert_allclose(first[:, 0], alone, rtol=1e-6)
    assert loss_of(answer) == pytest.approx(-float(weights @ alone) - alone.sum(), rel=1e-5)
