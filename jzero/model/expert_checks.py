"""A model with experts that cannot be."""

from jzero.errors import UserError
from jzero.model.architecture import QwenConfig
from jzero.model.families import FAMILIES, family_of


def check_experts(model: QwenConfig) -> None:
    """Raises UserError if the family and the number of experts do not go together."""
    has_experts = family_of(model.model_type).has_experts
    if has_experts and not model.num_experts:
        raise UserError(
            f"model.arch.model_type={model.model_type} has experts: set model.arch.num_experts, "
            "model.arch.num_experts_per_tok and model.arch.moe_intermediate_size"
        )
    if model.num_experts and not has_experts:
        names = ", ".join(name for name, family in FAMILIES.items() if family.has_experts)
        raise UserError(
            f"model.arch.num_experts={model.num_experts}: model_type={model.model_type} has no "
            f"experts; set it to 0, or choose a family that has them: {names}"
        )


def check_routing_replay(model: QwenConfig, replays_routes: bool) -> None:
    """Raises UserError if the routes of a model without experts shall be replayed."""
    if replays_routes and not model.num_experts:
        raise UserError(
            f"rollout.routing_replay=True: model_type={model.model_type} has no experts; set it to "
            "False"
        )
