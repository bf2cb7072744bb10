"""Drives a server with the Tinker SDK, whose version may be old: python sdk_tour.py URL.

The last line is a JSON object of facts that all have to be true. Runs in an environment with
`tinker` and without jzero.
"""

import inspect
import json
import sys
import warnings

import numpy as np
import tinker
from tinker import types

warnings.simplefilter("ignore")
NAME = "Qwen/Qwen3-8B-Base"
PROMPT = types.ModelInput.from_ints([72, 101, 108, 108, 111])
ADAM = types.AdamParams(learning_rate=1e-2)


def waited(value):
    """Returns a client, which newer versions hand out as a future."""
    return value.result() if hasattr(value, "result") else value


def datum(ids, **inputs):
    inputs = inputs or {"weights": [1.0] * (len(ids) - 1)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], **inputs},
    )


DATA = [datum(list(range(30, 50))), datum([5, 6, 7, 8])]


def logps(client, data):
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    return np.concatenate([np.array(one["logprobs"].data, np.float32) for one in outputs])


def named_and_drawn(sampler, ids, expected):
    """Returns facts about log-probs of named and of drawn tokens, in newer versions.

    expected: the log-probs of the prompt's own tokens from the second one on.
    """
    facts = {}
    named = np.array([*zip(ids[1:], range(len(ids) - 1), strict=True)], np.int64)
    named[3:, 1] = -1
    answer = sampler.sample(
        types.ModelInput.from_ints(ids),
        1,
        types.SamplingParams(max_tokens=1, temperature=0.8, seed=1),
        target_prompt_logprobs=types.TensorData.from_numpy(named),
        prompt_alt_tokens_k=3,
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=2,
    ).result()
    found = answer.target_prompt_logprobs.to_numpy()
    facts["named"] = bool((found[:, 0] == expected).all() and (found[3:, 1] == 0).all())
    facts["last"] = [one is None for one in answer.prompt_logprobs].count(False) == 2
    drawn = answer.prompt_alt_tokens
    tokens = drawn.tokens.to_numpy()
    again = sampler.sample(
        types.ModelInput.from_ints(ids),
        1,
        types.SamplingParams(max_tokens=1),
        target_prompt_logprobs=types.TensorData.from_numpy(tokens),
    ).result()
    logprobs = again.target_prompt_logprobs.to_numpy()
    facts["drawn"] = bool((logprobs == drawn.logprobs.to_numpy()).all())
    return facts


def main(url):
    facts = {"version": tinker.__version__}
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    facts["capabilities"] = service.get_server_capabilities().supported_models[0].model_name == NAME
    train = waited(service.create_lora_training_client(base_model=NAME, rank=4, seed=1))
    facts["info"] = train.get_info().model_data.model_name == NAME
    before = logps(train, DATA)
    gradient = train.forward_backward(DATA, "cross_entropy")
    step = train.optim_step(ADAM)
    facts["loss is a sum"] = bool(
        np.isclose(gradient.result().metrics["loss:sum"], -before.sum(), rtol=1e-4)
    )
    facts["step"] = step.result().metrics["grad_norm:mean"] > 0
    facts["trained"] = logps(train, DATA).sum() > before.sum()

    ratios = {"logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        result = train.forward_backward([datum([5, 6, 7, 8], **ratios)], loss).result()
        facts[loss] = bool(np.isfinite(result.metrics["loss:sum"]))
    train.optim_step(ADAM).result()
    try:
        train.forward_backward(DATA, "nonsense").result()
        facts["refused"] = False
    except Exception as error:
        facts["refused"] = "nonsense" in str(error) or "loss_fn" in str(error)

    sampler = waited(train.save_weights_and_get_sampling_client(name="s"))
    params = types.SamplingParams(max_tokens=8, seed=3)
    first = sampler.sample(PROMPT, 2, params).result()
    facts["same seed"] = [s.tokens for s in first.sequences] == [
        s.tokens for s in sampler.sample(PROMPT, 2, params).result().sequences
    ]
    ids = PROMPT.to_ints() + list(first.sequences[0].tokens)
    sampled = np.array(first.sequences[0].logprobs, np.float32)
    facts["exact"] = bool((logps(train, [datum(ids)])[-len(sampled) :] == sampled).all())
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
    facts["scored"] = bool((np.array(scored[-len(sampled) :], np.float32) == sampled).all())
    if "target_prompt_logprobs" in inspect.signature(sampler.sample).parameters:
        facts |= named_and_drawn(sampler, ids, np.array(scored[1:], np.float32))
    base = waited(service.create_sampling_client(base_model=NAME))
    facts["base"] = len(base.sample(PROMPT, 1, params).result().sequences) == 1

    path = train.save_state("a").result().path
    resumed = waited(service.create_training_client_from_state_with_optimizer(path))
    facts["resumed"] = bool((logps(resumed, DATA) == logps(train, DATA)).all())
    for one in (train, resumed):
        one.forward_backward(DATA, "cross_entropy")
        one.optim_step(ADAM).result()
    facts["resumed optimizer"] = bool((logps(resumed, DATA) == logps(train, DATA)).all())
    rest = service.create_rest_client()
    listed = rest.list_checkpoints(train.model_id).result().checkpoints
    facts["listed"] = path in [one.tinker_path for one in listed]
    facts["train_unembed"] = bool(rest.get_weights_info_by_tinker_path(path).result().train_unembed)
    # Comparisons of NumPy's numbers are no JSON.
    version = facts.pop("version")
    print(json.dumps({"version": version, **{name: bool(fact) for name, fact in facts.items()}}))


if __name__ == "__main__":
    main(sys.argv[1])
