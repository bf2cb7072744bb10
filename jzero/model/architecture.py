"""The values that describe a model: its sizes, and the tree that holds its parameters.

Nothing here computes. `layers.py` defines the parameters and the computation of a decoder layer,
`families.py` says which model family uses which layer, and `qwen.py` builds the whole model.

Dimension letters in this package:
  B rows   T tokens of a row   N = B * T tokens, flattened   L layers   V vocabulary
  E hidden size   F width of the MLP   H query heads   K KV heads   D dimensions of a head
  X experts of a layer   k experts of a token
"""

from dataclasses import dataclass

from jaxtyping import PyTree

from jzero.model.rope import RopeScaling

# A nested dict of arrays: {"embed", "layers": {"q", "k", ...}, "norm"}, and "lm_head" where the
# embedding is not tied, or "value" in a critic. The leaves below "layers" lead with an axis [L].
Params = dict[str, PyTree]


@dataclass(frozen=True)
class QwenConfig:
    """The settings that shape the computation, under the names of Hugging Face's config.json.

    They are those of every dense family. The name is from the time when there was only Qwen.
    """

    model_type: str  # a key of `families.FAMILIES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool
    rope_theta: float
    rms_norm_eps: float
    # A critic has a scalar head in place of logits. Hugging Face has no such setting.
    value_head: bool = False
    # How rotary frequencies are scaled; None: not at all. It is `rope_parameters` in a config.json.
    rope_scaling: RopeScaling | None = None
    # Experts of a layer (`experts.py`), how many of them a token goes to, the width of one, and
    # whether the weights of a token's experts are divided by their sum. 0 experts: a dense MLP.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @property
    def mlp_width_of_a_token(self) -> int:
        """Returns the columns of the MLP that one token is multiplied by."""
        if not self.num_experts:
            return self.intermediate_size
        return self.num_experts_per_tok * self.moe_intermediate_size


# The fields of QwenConfig that only a family with experts has in its config.json.
EXPERT_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
