"""The shape of a decoder that no class of transformers has; modeling_llmfp8.py computes it."""
from transformers import PretrainedConfig


class LlmFp8Config(PretrainedConfig):
    """The fields are those of the trainer's options, as it writes them to config.json."""
    model_type = "llmfp8"
    keys_to_ignore_at_inference = ["past_key_values"]
    attribute_map = {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size",
                     "num_key_value_heads": "num_query_groups", "head_dim": "kv_channels",
                     "max_position_embeddings": "max_positions"}

    def __init__(self, vocab_size=50257, num_layers=12, hidden_size=768, ffn_hidden_size=3072, num_attention_heads=12,
                 num_query_groups=12, kv_channels=64, max_positions=1024, norm="layer", position="learned",
                 activation="gelu", rotary_base=10000.0, rope=None, linear_bias="all", qk_norm=False, window=0,
                 local_rotary_base=0.0, attention_sinks=False, norm_eps=1e-5, init_std=0.02, tie_word_embeddings=True,
                 **kwargs):
        self.vocab_size = vocab_size
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_query_groups = num_query_groups
        self.kv_channels = kv_channels
        self.max_positions = max_positions
        self.norm = norm                       # layer or rms
        self.position = position               # learned or rope
        self.activation = activation           # gelu (tanh form), swiglu, relu2, geglu or clamped_swiglu
        self.rotary_base = rotary_base
        self.rope = rope or {"rope_type": "default"}   # scaling by the rule default (none), llama3, yarn or linear
        self.local_rotary_base = local_rotary_base     # in layers with a window, without scaling; 0: as the others
        self.linear_bias = linear_bias         # all, none, qkv, attention (qkv and output) or mlp
        self.qk_norm = qk_norm
        self.attention_sinks = attention_sinks   # a learned logit of each query head in its softmax
        # Keys that a query attends to, its own included; 0: all. A list is repeated over the layers.
        self.window = window
        self.norm_eps = norm_eps
        self.init_std = init_std
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)

    def window_of(self, layer):
        return self.window[layer % len(self.window)] if isinstance(self.window, list) else self.window
