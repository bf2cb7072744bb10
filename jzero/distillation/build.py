"""Builds the teacher of `config.teacher`, and checks that it fits the policy.

    check_teacher(settings, base, mesh)                       # fast and early: reads no weights
    teacher = make_teacher(settings, base, trainer, arrays)   # after the policy is built

Every process of a run calls both.
"""

from pathlib import Path

from jax.sharding import Mesh

from jzero.config import POSITIONS, ModelConfig, teachers
from jzero.decoder.program_settings import repeats_heads
from jzero.distillation.in_process import (
    ModelTeacher,
    TeacherArrays,
    TeacherSettings,
    Weights,
    own_row_shapes,
    teacher_learner,
)
from jzero.distillation.prompts import TeacherPrompts, read_template
from jzero.distillation.server import ScoringClient, ServerTeacher, check_tokens
from jzero.errors import UserError
from jzero.hosts import processes
from jzero.model import huggingface, peft, qwen, tokenizer
from jzero.model.base_model import BaseModel
from jzero.model.families import window_of
from jzero.model.tokenizer import PreTrainedTokenizerFast
from jzero.training.learner import Learner
from jzero.training.teacher import Teacher
from jzero.training.trainer import Trainer
from jzero.types import State


def make_teacher(
    settings: TeacherSettings | None,
    base: BaseModel,
    trainer: Trainer,
    arrays: TeacherArrays | None = None,
) -> Teacher | None:
    """Returns the teacher of a run, or None if the algorithm uses no teacher.

    arrays: of teacher=model, which `jzero.service.weights` loads onto the mesh of the trainer.
    """
    if settings is None:
        return None
    teacher = settings.choice
    prompts = make_prompts(settings, base.tokenizer)
    if isinstance(teacher, teachers.Server):
        return ServerTeacher(ScoringClient(teacher), prompts)

    policy = trainer.policy
    learner = policy
    if isinstance(teacher, teachers.Model):
        assert arrays is not None, "teacher=model needs its arrays"
        learner, weights = scoring_learner(arrays.model, trainer), weights_of_model(arrays)
    elif isinstance(teacher, teachers.Policy):
        weights = weights_of_policy(policy)
    else:
        weights = weights_of_reference
    own_rows = own_row_shapes(settings, policy.mesh)
    return ModelTeacher(trainer, learner, weights, prompts, own_rows)


def make_prompts(settings: TeacherSettings, tok: PreTrainedTokenizerFast) -> TeacherPrompts | None:
    """Returns the builder of the teacher's prompts, or None if it reads the policy's prompts."""
    if not settings.choice.prompt:
        return None
    template = read_template(settings.choice.prompt)
    return TeacherPrompts(template, settings.max_prompt_tokens, tok)


def describe_teacher(settings: TeacherSettings) -> str:
    """Returns a short description of the teacher, with its path or address."""
    teacher = settings.choice
    match teacher:
        case teachers.Model():
            description = teacher.path or settings.policy.path
            if teacher.adapter:
                description += f" with the adapter {teacher.adapter}"
        case teachers.Policy():
            description = "the policy itself"
        case teachers.Reference():
            description = "the reference policy"
        case teachers.Server():
            description = f"{teacher.model or 'the model'} at {teacher.url}"
    return f"{description} behind another prompt" if teacher.prompt else description


# -- weights ---------------------------------------------------------------------------------------


def weights_of_policy(policy: Learner) -> Weights:
    """Returns a function that returns the policy's parameters."""

    def weights(state: State, reference: qwen.Params | None) -> qwen.Params:
        return policy.weights(state)

    return weights


def weights_of_reference(state: State, reference: qwen.Params | None) -> qwen.Params:
    """Returns the parameters of the reference policy."""
    assert reference is not None, "teacher=reference needs the reference policy"
    return reference


def constant_weights(params: qwen.Params) -> Weights:
    """Returns a function that always returns `params`."""

    def weights(state: State, reference: qwen.Params | None) -> qwen.Params:
        return params

    return weights


def scoring_learner(model: qwen.QwenConfig, trainer: Trainer) -> Learner:
    """Returns the learner whose score program a teacher with architecture `model` runs.

    A teacher with the policy's architecture runs the policy's compiled program.
    """
    return trainer.policy if model == trainer.policy.model else teacher_learner(model, trainer)


def weights_of_model(arrays: TeacherArrays) -> Weights:
    """Returns a function that returns the parameters of teacher=model.

    A teacher that is an adapter on the policy's frozen base shares the arrays of the base.
    """
    if arrays.base is not None:
        return constant_weights(arrays.join(arrays.base))

    def weights_on_policy_base(state: State, reference: qwen.Params | None) -> qwen.Params:
        return arrays.join(state.base)

    return weights_on_policy_base


def teacher_directory(policy: ModelConfig, teacher: teachers.Model) -> Path:
    """Returns the directory of the teacher's model. Downloads a model from the hub."""
    path = teacher.path or policy.path
    try:
        return huggingface.resolve(path)
    except UserError as error:
        raise UserError(f"teacher.path={path}: {error}") from None


# -- checks ----------------------------------------------------------------------------------------


def check_teacher(settings: TeacherSettings | None, base: BaseModel, mesh: Mesh) -> None:
    """Raises UserError if the teacher cannot be reached, or does not fit the policy.

    Reads no weights. Prints a description of the teacher.
    """
    if settings is None:
        return
    make_prompts(settings, base.tokenizer)  # raises UserError if the template cannot be read
    processes.print_once(f"teacher: {describe_teacher(settings)}")
    teacher = settings.choice
    # Of a server only the tokens can be compared.
    if isinstance(teacher, teachers.Server):
        check_tokens(ScoringClient(teacher), base.tokenizer)
        return
    model, hf_config = base.model, base.hf_config
    if isinstance(teacher, teachers.Model):
        directory = teacher_directory(settings.policy, teacher)
        model, hf_config = huggingface.load_config(directory)
        check_vocabulary(directory, model, base)
        check_heads(teacher.path, model, mesh)
        if teacher.adapter:
            peft.read_settings(peft.resolve(teacher.adapter), model)
    check_length(settings, hf_config.get(POSITIONS), window_of(hf_config))
    own_row_shapes(settings, mesh)  # raises UserError if a row exceeds train.microbatch_tokens


def check_vocabulary(directory: Path, model: qwen.QwenConfig, base: BaseModel) -> None:
    """Raises UserError if the teacher in `directory` has other tokens than the policy."""
    # Models of one family pad their vocabularies differently, so tokenizers are compared instead of
    # vocabulary sizes.
    try:
        tok = tokenizer.load(str(directory))
    except UserError as error:
        raise UserError(f"teacher.path={directory}: {error}") from None
    check_tokenizer(str(directory), tok, base.tokenizer)
    # The policy may sample any id of its vocabulary, and the teacher's logits must have a column
    # for it.
    if model.vocab_size < base.model.vocab_size:
        raise UserError(
            f"teacher.path={directory} has a vocabulary of {model.vocab_size}, the policy one of "
            f"{base.model.vocab_size}: a teacher needs every token of the policy"
        )


def check_tokenizer(
    name: str,
    teacher: PreTrainedTokenizerFast,
    policy: PreTrainedTokenizerFast,
) -> None:
    """Raises UserError if a token of the policy has another id, or none, in the teacher."""
    vocabulary = teacher.get_vocab()
    # By id, so that every run reports the same first difference.
    for token, number in sorted(policy.get_vocab().items(), key=lambda item: item[1]):
        if vocabulary.get(token) != number:
            fact = f"has the id {vocabulary[token]}" if token in vocabulary else "does not exist"
            raise UserError(
                f"teacher.path={name} has another vocabulary than the policy: token {token!r}, "
                f"{number} of the policy, {fact} there; a teacher needs the policy's tokenizer"
            )


def check_heads(path: str, model: qwen.QwenConfig, mesh: Mesh) -> None:
    """Raises UserError if the tensor axis of the mesh cannot split the teacher's heads."""
    tensor, heads = mesh.shape["tensor"], model.num_key_value_heads
    if heads % tensor and not repeats_heads(model, tensor):
        raise UserError(
            f"mesh.tensor={tensor} does not divide the {heads} key-value heads of "
            f"teacher.path={path}; set it to one of their divisors, or to a multiple of them that "
            f"divides its {model.num_attention_heads} query heads"
        )


def check_length(
    settings: TeacherSettings, positions: int | None, window: int | None = None
) -> None:
    """Raises UserError if the longest possible input of the teacher exceeds its limits.

    positions: max_position_embeddings of the teacher's model, or None if it is not specified.
    window: its sliding window, or None. jzero attends to all tokens.
    """
    # With teacher.prompt the teacher's prompts have another maximum length than the policy's.
    longest = settings.max_prompt_tokens + settings.rollout.longest_continuation
    if positions is not None and longest > positions:
        raise UserError(
            f"the teacher's inputs have up to {longest} tokens, but its model has "
            f"{POSITIONS}={positions}: lower teacher.max_prompt_tokens or rollout.max_new_tokens"
        )
    if window is not None and longest > window:
        raise UserError(
            f"the teacher's inputs have up to {longest} tokens, but its model has "
            f"sliding_window={window}, and jzero attends to all tokens: lower "
            "teacher.max_prompt_tokens or rollout.max_new_tokens"
        )
