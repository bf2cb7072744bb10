"""Runs jzero's engine under JetStream's orchestrator and gRPC server, with greedy decoding.

JetStream 0.2.2, the latest release, is archived and depends on TensorFlow, so it is an extra and is
imported only in `serve_jetstream`. Its orchestrator calls an engine from several threads, takes one
token of every slot per call, prepends an end-of-text token to each prompt, and never frees a slot:
it only refills slots. The classes here adapt the engine and the tokenizer to this interface.
"""

import logging
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jzero.decoder.decode_state import DecodeState, Prefix
from jzero.decoder.engine import Engine, Placement
from jzero.decoder.prefill import prefill_shape
from jzero.model import qwen, tokenizer
from jzero.model.tokenizer import PreTrainedTokenizerFast

PrefixAndLength = tuple[Prefix[jax.Array], int]


class JetStreamTokenizer:
    """A tokenizer with JetStream's method names."""

    def __init__(self, text_tokenizer: PreTrainedTokenizerFast, stop_ids: tuple[int, ...]) -> None:
        self.tokenizer = text_tokenizer
        self.stop_tokens = set(stop_ids)
        # `prefill` removes it again, except from an empty prompt, which needs a token.
        self.bos_id = stop_ids[0]
        self.pad_id = 0

    def encode(self, text: str, **_: object) -> tuple[np.ndarray, int]:
        """Returns the token ids after a leading end-of-text token, and their number."""
        ids = [self.bos_id, *tokenizer.prompt_ids(self.tokenizer, text)]
        return np.array(ids), len(ids)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids, without tokens that end a response."""
        kept = [token for token in ids if token not in self.stop_tokens]
        return tokenizer.decode(self.tokenizer, kept)


class JetStreamEngine:
    """An engine with the methods that JetStream's orchestrator calls."""

    samples_per_slot = 1

    def __init__(
        self,
        engine: Engine,
        text_tokenizer: PreTrainedTokenizerFast,
        params: qwen.Params,
        seed: jax.Array,
    ) -> None:
        self.engine = engine
        self.tokenizer = text_tokenizer
        self.params = params
        self.seed = seed
        # Held during every call, because the threads of the orchestrator share the engine.
        self.lock = threading.Lock()
        self.max_concurrent_decodes = engine.max_concurrent_decodes
        # JetStream pads prompts to powers of two, up to 2**15.
        self.max_prefill_length = 1 << min(15, engine.max_sequence_tokens.bit_length() - 1)
        # Calls since each slot was filled, and the number of calls that return a valid token.
        self.num_calls = np.zeros(engine.max_concurrent_decodes, np.int32)
        self.most_calls = np.zeros(engine.max_concurrent_decodes, np.int32)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Returns the mesh that the engine decodes on."""
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """Returns None: the engine uses no CPU devices of its hosts."""
        return None

    def get_prefix_destination_sharding(self) -> Prefix[NamedSharding]:
        """Returns the sharding that `insert` requires of a prefix."""
        return self.engine.get_prefix_destination_sharding()

    def load_params(self, *args: object, **kwargs: object) -> qwen.Params:
        """Returns the weights. JetStream passes no arguments."""
        assert not args and not kwargs, f"{args=} {kwargs=}"
        return self.params

    def init_decode_state(self, *args: object, **kwargs: object) -> DecodeState[jax.Array]:
        """Returns a state in which all slots are empty. JetStream passes no arguments."""
        assert not args and not kwargs, f"{args=} {kwargs=}"
        return self.engine.init_decode_state()

    def get_tokenizer(self) -> str:
        """Returns the metadata that JetStream passes to `build_tokenizer`; empty here."""
        return ""

    def build_tokenizer(self, metadata: str) -> JetStreamTokenizer:
        """Returns the tokenizer. `metadata` comes from `get_tokenizer`."""
        return JetStreamTokenizer(self.tokenizer, self.engine.stop_ids)

    def prefill(
        self,
        *,
        params: qwen.Params,
        existing_prefix: PrefixAndLength | None = None,
        padded_tokens: np.ndarray,
        true_length: int,
    ) -> PrefixAndLength:
        """Prefills a prompt without its leading end-of-text token.

        A prompt that is too long loses its beginning. JetStream 0.2.2 never passes an existing
        prefix.
        """
        assert existing_prefix is None, "the engine shares prefixes by itself"
        tokens = padded_tokens[:true_length]
        # Remove the end-of-text token that JetStream has put before the prompt.
        if true_length > 1:
            tokens = tokens[1:]
        # Leave room for at least one new token.
        tokens = tokens[1 - self.engine.max_sequence_tokens :]
        width, _ = prefill_shape(self.engine, len(tokens))
        with self.lock:
            prefix = self.engine.prefill(
                params=params,
                padded_tokens=np.pad(tokens, (0, width - len(tokens))),
                true_length=len(tokens),
                temperature=0.0,
                seed=self.seed,
            )
        return prefix, len(tokens)

    def insert(
        self, prefix: PrefixAndLength, decode_state: DecodeState[jax.Array], slot: int
    ) -> DecodeState[jax.Array]:
        """Starts a prompt in a slot, and frees the slot's previous sequence."""
        kv, length = prefix
        with self.lock:
            # JetStream refills slots without freeing them.
            if slot in self.engine.placements:
                self.engine.free_resource(slot)
            self.num_calls[slot] = 0
            self.most_calls[slot] = self.engine.max_sequence_tokens - length
            placement = Placement(
                slot=slot,
                prefix_row=0,
                sample_index=0,
                length=length,
                limit=self.engine.max_sequence_tokens,
                request=0,
                # One group for each slot, because JetStream samples each prompt once.
                group=slot,
                shared_tokens=0,
            )
            return self.engine.insert(kv, decode_state, placement, 0.0)

    def generate(
        self, params: qwen.Params, decode_state: DecodeState[jax.Array]
    ) -> tuple[DecodeState[jax.Array], object]:
        """Decodes one step. Returns the tokens of the previous call, or of the prefill."""
        from jetstream.engine import engine_api

        with self.lock:
            # The state holds the inputs of this step: the tokens that the previous step sampled.
            self.num_calls += 1
            is_valid = self.num_calls <= self.most_calls
            columns = (decode_state.tokens, is_valid, self.num_calls.copy())
            # JetStream reads columns of one array: tokens, validity, lengths.
            result = engine_api.ResultTokens(jnp.stack(columns, axis=1), (0, 1), (1, 2), (2, 3), 1)
            decode_state, _ = self.engine.generate(params, decode_state, self.seed)
            return decode_state, result


def serve_jetstream(port: int, engine: JetStreamEngine) -> None:
    """Serves gRPC on every interface until Ctrl-C, which ends the process."""
    from jetstream.core import config_lib, server_lib

    jax.__dict__["tree_map"] = jax.tree.map  # JAX has removed this name
    logging.getLogger().setLevel(logging.WARNING)
    config = config_lib.ServerConfig(
        interleaved_slices=("all=1",),
        interleaved_engine_create_fns=(lambda _: engine,),
    )
    # The server stops when its last reference is deleted.
    _server = server_lib.run(port, config, [None], jax_padding=False)
    # Threads of the orchestrator would block an orderly exit.
    signal.signal(signal.SIGINT, lambda *_: os._exit(0))
    threading.Event().wait()
