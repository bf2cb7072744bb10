"""A model to sample from and to score with, in a script or a notebook: `jzero.open(PATH)`.

    import jzero

    with jzero.open("Qwen/Qwen2.5-0.5B-Instruct") as model:
        for answers in model.generate(["What is 2 + 3?"], n=4, max_new_tokens=64):
            print([answer.text for answer in answers])
        [logps] = model.score(["What is 2 + 3?"], ["5"])
        print(logps.sum())

PATH is the workdir of a run, whose newest export is opened, or the directory or hub id of a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np
from jaxtyping import Float32, Int32

from jzero import chat, config
from jzero.decoder.driver import Batch, Phase
from jzero.decoder.engine import Samples
from jzero.decoder.scoring import Scoring, score_all
from jzero.decoder.sequence import make_groups
from jzero.errors import UserError
from jzero.model import qwen, tokenizer
from jzero.planning.fitting import set_cpu_devices
from jzero.rollout.sampler import Sampler
from jzero.run.finished import find_model
from jzero.service.decoders import load
from jzero.types import Prompt
from jzero.workers.pool import Pool


@dataclass(frozen=True)
class Answer:
    """One sampled answer to a prompt."""

    text: str  # without the stop string or the token that ended it
    tokens: Int32[np.ndarray, " tokens"]  # with the token that ended it
    # log-probability of each token at the temperature of the call, over the whole vocabulary
    logps: Float32[np.ndarray, " tokens"]
    finish_reason: str  # "stop": the model ended the answer; "length": it reached max_new_tokens


class OpenModel:
    """A loaded model. It holds its devices until `close`, or until the end of its `with` block."""

    def __init__(self, sampler: Sampler, weights: qwen.Params, pool: Pool) -> None:
        self.sampler = sampler
        self.weights: qwen.Params | None = weights
        self.pool = pool
        self.num_calls = 0  # of `generate` without a seed: each samples other answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the weights. The model can no longer be used."""
        self.weights = None
        self.pool.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        n: int = 1,
        *,
        temperature: float = 1.0,
        greedy: bool = False,
        max_new_tokens: int = 0,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> list[list[Answer]]:
        """Returns `n` answers to each prompt, in the order of the prompts.

        Args:
            prompts: texts, or conversations as lists of {"role": ..., "content": ...}. If the model
                has a chat template, a text is the message of a user; otherwise it is continued.
            n: answers to each prompt. They share the computation of the prompt.
            temperature: of sampling; 0 takes the most probable token.
            greedy: the same as temperature=0.
            max_new_tokens: the longest answer; 0: as long as the model was opened for.
            stop: texts that end an answer, besides the model's own end tokens.
            seed: the same seed samples the same answers. None: other answers with every call.

        Raises:
            UserError: an argument is wrong, or a prompt is too long.
        """
        engine = self.sampler.engine
        longest = engine.settings.max_new_tokens
        new_tokens = max_new_tokens or longest
        if not 1 <= new_tokens <= longest:
            raise UserError(
                f"max_new_tokens={max_new_tokens}: the model is open for 1 to {longest}: give "
                "max_new_tokens to jzero.open for longer answers"
            )
        if n < 1:
            raise UserError(f"n={n}: give at least 1")
        if not 0 <= temperature < float("inf"):
            raise UserError(f"temperature={temperature}: give a number of at least 0")
        if seed is None:
            seed, self.num_calls = self.num_calls, self.num_calls + 1
        groups = make_groups(self._encode(prompts), n, new_tokens)
        stops = [stop] if isinstance(stop, str) else list(stop)
        for group in groups:
            for sequence in group:
                sequence.stop_strings = [text for text in stops if text]
        if greedy:
            temperature = 0.0
        samples = Samples(is_trained=False)
        phase = Phase(self._weights(), (seed, 0), n, temperature, samples=samples)
        self.sampler.decoder.run(phase, Batch(groups))
        return [
            [
                Answer(
                    text=sequence.turn_text,
                    tokens=np.array(sequence.new_tokens, np.int32),
                    logps=np.array(sequence.new_logps, np.float32),
                    finish_reason=sequence.finish_reason,
                )
                for sequence in group
            ]
            for group in groups
        ]

    def score(
        self, prompts: Prompt | Sequence[Prompt], answers: str | Sequence[str]
    ) -> list[Float32[np.ndarray, " tokens"]]:
        """Returns the log-probability of each token of each answer, given its prompt.

        They are those of temperature 1 over the whole vocabulary. There is one answer for each
        prompt, and `answers` has no end token.

        Raises:
            UserError: the numbers of prompts and answers differ, an answer has no token, or a
                sequence is too long.
        """
        encoded = self._encode(prompts)
        texts = [answers] if isinstance(answers, str) else list(answers)
        if len(texts) != len(encoded):
            raise UserError(f"{len(texts)} answers for {len(encoded)} prompts: give one for each")
        longest = self.sampler.engine.max_sequence_tokens
        scorings = []
        for number, (prompt, text) in enumerate(zip(encoded, texts, strict=True)):
            tokens = tokenizer.encode(self.sampler.tokenizer, text)
            if not tokens:
                raise UserError(f"answers[{number}] is empty: give at least one token")
            if len(prompt) + len(tokens) > longest:
                raise UserError(
                    f"answers[{number}] has {len(prompt) + len(tokens)} tokens with its prompt, "
                    f"and the model is open for {longest}: open it with larger lengths"
                )
            sequence = np.concatenate([prompt, np.array(tokens, np.int32)])
            scorings.append(Scoring(sequence, first=len(prompt)))
        score_all(self.sampler.engine, self._weights(), scorings)
        return [scoring.scores.logps for scoring in scorings]

    def _weights(self) -> qwen.Params:
        if self.weights is None:
            raise UserError("the model is closed: call jzero.open again")
        return self.weights

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[Int32[np.ndarray, " tokens"]]:
        """Returns the token ids of each prompt. Raises UserError if one is too long."""
        is_chat = bool(self.sampler.tokenizer.chat_template)
        longest = self.sampler.engine.settings.max_prompt_tokens
        encoded = []
        for number, prompt in enumerate(as_prompts(prompts)):
            if isinstance(prompt, str) and is_chat:
                prompt = [{"role": "user", "content": prompt}]
            tokens = self.sampler.prompt_ids(prompt)
            if not 0 < len(tokens) <= longest:
                raise UserError(
                    f"prompts[{number}] has {len(tokens)} tokens, and the model is open for 1 to "
                    f"{longest}: give max_prompt_tokens to jzero.open for longer prompts"
                )
            encoded.append(np.array(tokens, np.int32))
        return encoded


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns a list of prompts, of one if `prompts` is a text or a conversation."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(message, dict) for message in prompts):
        return [prompts]  # type: ignore[list-item]  # a conversation
    return list(prompts)  # type: ignore[arg-type]  # not a conversation


def open_model(
    path: str,
    *,
    adapter: str = "",
    dtype: str = "",
    max_prompt_tokens: int = 0,
    max_new_tokens: int = 0,
    num_slots: int = 0,
) -> OpenModel:
    """Opens a model on all devices of this machine. Use it in a `with` block, or call `close`.

    Args:
        path: workdir of a run, or directory or hub id of a model.
        adapter: directory or hub id of an adapter of the model, in PEFT's format.
        dtype: "bfloat16" or "float32", of the computation; "": that of the run, or bfloat16.
        max_prompt_tokens: the longest prompt; 0: that of `jzero chat`.
        max_new_tokens: the longest answer; 0: that of the run, else 3,000 tokens, or fewer for a
            model with few positions.
        num_slots: answers that are decoded at the same time; 0: as many as `jzero evaluate` takes.

    Raises:
        UserError: the model cannot be read, or does not fit the machine.
    """
    found = find_model(str(path))
    if adapter:
        found = replace(found, adapter=adapter)
    settings = chat.dialogue_settings(found)
    given = {
        "max_prompt_tokens": max_prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "num_slots": num_slots,
    }
    rollout = replace(settings.rollout, **{name: size for name, size in given.items() if size})
    model = replace(settings.model, dtype=dtype) if dtype else settings.model
    settings = replace(settings, rollout=rollout, model=model)
    config.validate(settings)
    set_cpu_devices(settings.model.path)
    pool = Pool(0)  # nothing is graded
    try:
        sampler, weights = load(settings, pool)
    except BaseException:
        pool.close()
        raise
    return OpenModel(sampler, weights, pool)
