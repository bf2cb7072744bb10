"""Settings of a teacher, and of the parts of a loss, that do not fit together."""

import pytest
from settings_by_name import changed_config

from jzero.config import validate
from jzero.errors import UserError

COEF = {"algorithm.distillation.coef": 1.0}
MODEL = COEF | {"teacher": "model", "teacher.path": "a/teacher"}
MYSELF = COEF | {"teacher": "policy", "teacher.prompt": "{prompt}{gold}"}
SERVER = COEF | {"teacher": "server", "teacher.url": "http://localhost:8000/v1"}


@pytest.mark.parametrize(
    "settings",
    [
        MODEL,
        MODEL | {"teacher.prompt": "{prompt}{gold}", "teacher.max_prompt_tokens": 99},
        MODEL | {"algorithm.advantage": "zero", "rollout.group_size": 1},
        COEF | {"teacher": "model", "teacher.adapter": "a/lora", "model.path": "a/base"},
        MYSELF,
        COEF | {"teacher": "reference"},
        SERVER | {"teacher.request": "prompt_logprobs"},
        {
            "algorithm.rl_coef": 0.0,
            "algorithm.cross_entropy.coef": 1.0,
            "algorithm.cross_entropy.tokens": "correct",
        },
    ],
    ids=str,
)
def test_a_teacher_with_its_own_settings_is_accepted(settings: dict[str, object]) -> None:
    validate(changed_config(settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (COEF, r"distillation.coef=1.0 needs a teacher: set teacher"),
        (
            {"teacher": "model", "teacher.path": "x"},
            "no effect with algorithm.distillation.coef=0",
        ),
        (COEF | {"teacher": "model"}, "teacher=model needs teacher.path or"),
        (COEF | {"teacher": "model", "teacher.adapter": "x"}, "set teacher.path, or model"),
        (COEF | {"teacher": "policy"}, "nothing to teach: set teacher.prompt"),
        (COEF | {"teacher": "server"}, "teacher.url= is not a server address"),
        (SERVER | {"rollout.temperature": 0.6}, "at temperature 1; set rollout.temperature=1"),
        (SERVER | {"teacher.path": "x"}, "teacher=server has no path: model has it"),
        (MODEL | {"teacher.url": "x"}, "teacher=model has no url: server has it"),
        (MODEL | {"teacher.max_prompt_tokens": 9}, "no effect without teacher.prompt"),
        ({"teacher.prompt": "{prompt}"}, "teacher=none has no prompt: model, policy"),
        (MODEL | {"sft.data": "x"}, "teacher=model is only for RL, and this run has sft: set"),
        (
            MODEL | {"algorithm.rl_coef": 0.0, "algorithm.cross_entropy.coef": 1.0},
            "rl_coef=0 leaves out",
        ),
        ({"algorithm.rl_coef": 0.0}, "leaves no part of the loss"),
        (
            {"algorithm.cross_entropy.tokens": "correct"},
            "cross_entropy=.*tokens=.correct.. has no effect without",
        ),
        ({"algorithm.advantage": "zero"}, "without algorithm.distillation.coef learns nothing"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_together_are_one_line(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        validate(changed_config(settings))
    assert "\n" not in str(raised.value)
