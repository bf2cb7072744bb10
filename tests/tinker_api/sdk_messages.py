"""Prints random messages that the SDK's own classes wrote: python sdk_messages.py SEED.

Each line is {"name": the message, "hex": its bytes}. Runs in an environment with `tinker`.
"""

import json
import random
import sys

from tinker.proto import tinker_public_pb2 as pb

DTYPES = (1, 2, 3)


def has_field(message, name):
    """Returns whether this version of the SDK has a field."""
    return name in message.DESCRIPTOR.fields_by_name


def tensor(rng, target):
    target.dtype = rng.choice(DTYPES)
    target.shape.extend(rng.choice([0, 1, 127, 128, 2**40, -1]) for _ in range(rng.randrange(3)))
    if rng.random() < 0.5:
        target.dense = rng.randbytes(rng.choice([0, 1, 8, 200]))
    else:
        target.sparse_csr.values = rng.randbytes(8)
        target.sparse_csr.crow_indices = rng.randbytes(16)


def request(rng):
    message = pb.ForwardBackwardRequest(
        model_id=rng.choice(["", "m", "ü" * 70]),
        seq_id=rng.choice([0, 1, 300, 2**31 - 1, -1]),
        loss_fn=rng.choice(["", "ppo"]),
        forward_only=rng.random() < 0.5,
    )
    for _ in range(rng.randrange(4)):
        datum = message.data.add()
        for _ in range(rng.randrange(3)):
            datum.model_input.add().encoded_text.tokens = rng.randbytes(rng.choice([0, 4, 400]))
        for name in rng.sample(["weights", "target_tokens", "a"], rng.randrange(4)):
            tensor(rng, datum.loss_fn_inputs[name])
    for name in rng.sample(["beta", "clip", "z"], rng.randrange(3)):
        message.loss_fn_config[name] = rng.choice([0.0, -1.5, 1e300])
        if has_field(message, "loss_fn_config_v2"):
            message.loss_fn_config_v2[name].number = rng.choice([0.0, 2.0])
    return message


def response(rng):
    message = pb.SampleResponse(prompt_cache_hit_tokens=rng.choice([0, 7, -1]))
    for _ in range(rng.randrange(4)):
        one = message.sequences.add(stop_reason=rng.randrange(2), tokens=rng.randbytes(8))
        if rng.random() < 0.5:
            one.logprobs = rng.randbytes(rng.choice([0, 8]))
        if rng.random() < 0.5 and has_field(one, "topk_sampled_logprobs"):
            one.topk_sampled_logprobs.k = rng.randrange(3)
            one.topk_sampled_logprobs.token_ids = rng.randbytes(4)
    if rng.random() < 0.5:
        message.prompt_logprobs = rng.randbytes(rng.choice([0, 12]))
    if rng.random() < 0.5:
        prompt = message.topk_prompt_logprobs
        # The count of tokens has other names in other versions.
        count = "length" if has_field(prompt, "length") else "prompt_length"
        setattr(prompt, count, rng.randrange(200))
    if rng.random() < 0.5 and has_field(message, "target_prompt_logprobs"):
        tensor(rng, message.target_prompt_logprobs)
    if rng.random() < 0.5 and has_field(message, "prompt_alt_tokens"):
        tensor(rng, message.prompt_alt_tokens.tokens)
        tensor(rng, message.prompt_alt_tokens.logprobs)
    return message


def output(rng):
    message = pb.ForwardBackwardOutput(loss_fn_output_type=rng.choice(["", "TorchLossReturn"]))
    for _ in range(rng.randrange(3)):
        record = message.loss_fn_outputs.add(num_datums=rng.randrange(3))
        for name in rng.sample(["logprobs", "x"], rng.randrange(3)):
            record.fields[name].data = rng.randbytes(5)
            record.fields[name].trailing_shape.extend([3] * rng.randrange(2))
    for name in rng.sample(["loss:sum", "a:mean"], rng.randrange(3)):
        message.metrics[name] = rng.choice([0.0, 1.25])
    return message


def main(seed):
    rng = random.Random(seed)
    for _ in range(300):
        message = rng.choice([request, response, output])(rng)
        data = message.SerializeToString(deterministic=True)
        print(json.dumps({"name": message.DESCRIPTOR.name, "hex": data.hex()}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
