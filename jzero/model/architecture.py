"""The values that describe a model: its sizes, and the tree that holds its parameters.

Nothing here computes on arrays. `layers.py` defines the parameters and the computation of a decoder
layer, `families.py` maps every model family to its layer, and `qwen.py` builds the complete model.

Dimension letters in this package:
  B rows   T tokens of a row   N = B * T tokens, flattened   L layers   V vocabulary
  E hidden size   F width of the MLP   H query heads   K KV heads   D dimensions of a head
  X experts of a layer   k experts of a token
"""

from dataclasses import dataclass

from jaxtyping import PyTree

from jzero.model.rope import RopeScaling

# A nested dict of arrays: {"embed", "layers": {"q", "k", ...}, "norm"}, with "lm_head" if the
# embedding is not tied, "value" in a critic, or "mtp" (`mtp.py`). The leaves below "layers" lead
# with an axis [L].
Params = dict[str, PyTree]


# The values of `QwenConfig.layer_types`, as in config.json.
ATTENTION = "full_attention"
SLIDING = "sliding_attention"  # attention to the newest `sliding_window` tokens
DELTA_NET = "linear_attention"

NO_WINDOW = 2**30  # the window of a layer that attends to all tokens: no sequence fills it

# Parameters that stay in fp32 when the others are cast: the gates of a gated delta net are
# exponentials of exponentials, and bf16 would change the decay rate of the state by a percent.
FP32_PARAMETERS = frozenset({"delta_decay", "delta_step_bias"})


def kept_dtype(name: str, dtype: str) -> str:
    """Returns the type of the parameter `name` ("layers.q") when others are cast to `dtype`."""
    return "float32" if name.rpartition(".")[2] in FP32_PARAMETERS else dtype


def layers_with_windows(num_layers: int, pattern: int) -> tuple[str, ...]:
    """Returns the kinds of layers: each `pattern`-th one has full attention, the others windows."""
    numbers = range(1, num_layers + 1)
    return tuple(SLIDING if number % pattern else ATTENTION for number in numbers)


@dataclass(frozen=True)
class DeltaNetConfig:
    """The sizes of a gated delta net (`delta_net.py`)."""

    num_key_heads: int  # also the number of query heads
    num_value_heads: int  # a multiple of `num_key_heads`
    key_dim: int
    value_dim: int
    kernel_size: int  # width of the causal convolution, in tokens

    @property
    def num_channels(self) -> int:
        """The channels of the convolution: q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_numbers(self) -> int:
        """The number of fp32 values in the state of one layer and one sequence."""
        recurrent = self.num_value_heads * self.key_dim * self.value_dim
        return recurrent + (self.kernel_size - 1) * self.num_channels


@dataclass(frozen=True)
class QwenConfig:
    """The settings that determine the computation, under the names of Hugging Face's config.json.

    They apply to every family. The name dates from the time when Qwen was the only family.
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
    # A critic has a scalar head instead of logits. config.json has no such entry.
    value_head: bool = False
    # How rotary frequencies are scaled; None: not at all. In config.json: `rope_parameters`.
    rope_scaling: RopeScaling | None = None
    # For hybrids of attention and gated delta nets: the kind of every layer, the sizes of the delta
    # nets, and the share of a head's dimensions that RoPE rotates.
    layer_types: tuple[str, ...] | None = None
    delta_net: DeltaNetConfig | None = None
    partial_rotary_factor: float = 1.0
    # For models with sliding windows: tokens in the window of a SLIDING layer, with the token
    # itself, and the base and the scaling of its rotary frequencies. 0: those of all layers.
    sliding_window: int = 0
    local_rope_theta: float = 0.0
    local_rope_scaling: RopeScaling | None = None
    # Scores are divided by the square root of this number. 0: of head_dim.
    query_scale: int = 0
    # Bounds of the scores of attention, and of the logits (`attention.xla.soft_capped`). 0: none.
    attn_logit_softcapping: float = 0.0
    final_logit_softcapping: float = 0.0
    # For MoE (`experts.py`): experts of a layer, experts per token, the width of one expert, and
    # whether the weights of a token's experts are divided by their sum. 0 experts: a dense MLP.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    # The width of the shared MLP next to the experts that every token goes to. 0: no shared MLP.
    shared_expert_intermediate_size: int = 0
    # Whether the parameters have the head for multi-token prediction (`mtp.py`), which only
    # rollout.draft=mtp uses.
    mtp: bool = False

    @property
    def mlp_width_of_a_token(self) -> int:
        """The MLP width that one token uses: its experts and the shared MLP in an MoE model."""
        if not self.num_experts:
            return self.intermediate_size
        chosen = self.num_experts_per_tok * self.moe_intermediate_size
        return chosen + self.shared_expert_intermediate_size

    @property
    def rotary_dim(self) -> int:
        """The leading dimensions of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with attention, which need a KV cache."""
        return tuple(sorted(self.layers_of(ATTENTION) + self.layers_of(SLIDING)))

    @property
    def num_cached_layers(self) -> int:
        """The number of layers in a KV cache: those with attention, and the head's."""
        return len(self.attention_layers) + self.mtp

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """The window of every layer in tokens; empty for a model without sliding windows."""
        if not self.sliding_window:
            return ()
        assert self.layer_types is not None
        return tuple(
            self.sliding_window if kind == SLIDING else NO_WINDOW for kind in self.layer_types
        )

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with a gated delta net, which need a recurrent state."""
        return self.layers_of(DELTA_NET)

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Returns the numbers of the layers of a kind. By default all layers have attention."""
        kinds = self.layer_types or (ATTENTION,) * self.num_hidden_layers
        return tuple(number for number, layer_kind in enumerate(kinds) if layer_kind == kind)


# Fields of QwenConfig that only families with experts have in config.json.
EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "shared_expert_intermediate_size",
)


def track_sizes(model: QwenConfig, kept: int, replays_routes: bool) -> dict[str, int]:
    """Returns the sizes that entries of `tokens.TRACKS` name; 0: a run does not record the track.

    kept: the number K of tokens that the sampler's filters keep, or 0 (`config.num_kept`). Routes
    are the number L * k of experts that one token passes in all layers.
    """
    num_routes = model.num_hidden_layers * model.num_experts_per_tok
    return {
        "kept": min(kept, model.vocab_size),
        "routes": num_routes if replays_routes else 0,
    }
