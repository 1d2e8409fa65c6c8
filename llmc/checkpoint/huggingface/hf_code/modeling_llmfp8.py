"""A decoder of the trainer's options for transformers: norms, positions, activations, biases, grouped queries, qk-norm,
sliding windows, tied or separate head. AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) reads it."""
import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_llmfp8 import LlmFp8Config

# What transformers calls a cache of keys and values: its name changed in version 5.24.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
BIASES = {"all": {"qkv", "o", "mlp"}, "none": set(), "qkv": {"qkv"}, "attention": {"qkv", "o"}, "mlp": {"mlp"}}


def clamped_swiglu(gate, up):
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1)


GATES = {"swiglu": lambda gate, up: F.silu(gate) * up, "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
         "clamped_swiglu": clamped_swiglu}


class RmsNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def make_norm(config):
    if config.norm == "rms":
        return RmsNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)


def yarn_share(config, scaling, pairs):
    """How much of each frequency is kept: all of those that turn often within the original length."""
    def pair_of(turns):
        return (config.kv_channels * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(config.rotary_base)))

    low, high = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.kv_channels - 1)
    return 1 - ((pairs / 2 - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def rope_tables(config, positions, local):
    """Cosines and sines (B, T, head dim / 2). The llama3 and yarn rules divide low frequencies by a factor."""
    base, scaling = config.rotary_base, config.rope
    if local:
        base, scaling = config.local_rotary_base, {"rope_type": "default"}
    pairs = torch.arange(0, config.kv_channels // 2 * 2, 2, dtype=torch.float64, device=positions.device)
    frequencies = base ** (-pairs / config.kv_channels)
    scale = 1.0
    if scaling["rope_type"] != "default":
        if scaling["rope_type"] == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
            keep = ((turns - low) / (high - low)).clamp(0, 1)
        elif scaling["rope_type"] == "linear":
            keep = torch.zeros_like(frequencies)
        else:
            keep = yarn_share(config, scaling, pairs)
            scale = scaling.get("attention_factor") or 0.1 * math.log(scaling["factor"]) + 1
        frequencies = (1 - keep) * frequencies / scaling["factor"] + keep * frequencies
    angles = positions[..., None].double() * frequencies
    return (scale * angles.cos()).float(), (scale * angles.sin()).float()


def rotate(x, cos, sin):
    """x (B, heads, T, head dim): element i is paired with i + head dim / 2."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.heads, self.groups, self.size = (layer, config.num_attention_heads, config.num_query_groups,
                                                          config.kv_channels)
        biases = BIASES[config.linear_bias]
        queries, keys = self.heads * self.size, self.groups * self.size
        self.q_proj = nn.Linear(config.hidden_size, queries, bias="qkv" in biases)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias="qkv" in biases)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias="qkv" in biases)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias="o" in biases)
        if config.qk_norm:
            self.q_norm = RmsNorm(self.size, config.norm_eps)
            self.k_norm = RmsNorm(self.size, config.norm_eps)
        if config.attention_sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads))

    def forward(self, x, mask, rope, cache):
        batch, length = x.shape[:2]

        def split(y, heads):
            return y.view(batch, length, heads, self.size)
        q, k, v = split(self.q_proj(x), self.heads), split(self.k_proj(x), self.groups), split(self.v_proj(x),
                                                                                              self.groups)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        shared = self.heads // self.groups
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        if hasattr(self, "sinks"):   # the score of a key 0 with the value 0 that every query sees
            sinks = self.sinks[:, None, None].expand(batch, -1, length, 1)
            nothing = k.new_zeros(batch, self.heads, 1, self.size)
            k, v = torch.cat((k, nothing), dim=2), torch.cat((v, nothing), dim=2)
            mask = torch.cat((mask.expand(batch, self.heads, -1, -1), sinks.to(mask.dtype)), dim=3)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.size ** -0.5)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.activation = config.activation
        bias, hidden, inner = "mlp" in BIASES[config.linear_bias], config.hidden_size, config.ffn_hidden_size
        if self.activation in GATES:
            self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        y = self.up_proj(x)
        if self.activation in GATES:
            y = GATES[self.activation](self.gate_proj(x), y)
        elif self.activation == "relu2":
            y = F.relu(y).square()
        else:
            y = F.gelu(y, approximate="tanh")
        return self.down_proj(y)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = Mlp(config)

    def forward(self, x, mask, rope, cache):
        x = x + self.self_attn(self.input_layernorm(x), mask, rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position == "learned":
            self.embed_positions = nn.Embedding(config.max_positions, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = make_norm(config)

    def mask_of(self, window, attention_mask, past, length, like):
        """What is added to the scores, (B or 1, 1, T, past + T): the lowest number hides a key; every row is finite."""
        keys = torch.arange(past + length, device=like.device)
        queries = torch.arange(past, past + length, device=like.device)[:, None]
        visible = keys <= queries
        if window > 0:
            visible = visible & (keys > queries - window)
        visible = visible[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :past + length].bool()
        hidden = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
        return hidden.masked_fill(~visible, torch.finfo(like.dtype).min)

    def is_local(self, window):
        return window > 0 and self.config.local_rotary_base > 0

    def forward(self, x, attention_mask, position_ids, cache):
        past, length = cache.get_seq_length() if cache is not None else 0, x.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + length, device=x.device)[None]
        windows, ropes = [self.config.window_of(layer) for layer in range(len(self.layers))], {}
        for local in {self.is_local(window) for window in windows}:
            ropes[local] = None
            if self.config.position == "rope":
                ropes[local] = [table[:, None] for table in rope_tables(self.config, position_ids, local)]
        if self.config.position == "learned":
            x = x + self.embed_positions(position_ids)
        masks = {window: self.mask_of(window, attention_mask, past, length, x) for window in set(windows)}
        for layer, window in zip(self.layers, windows):
            x = layer(x, masks[window], ropes[self.is_local(window)], cache)
        return self.norm(x)


class LlmFp8ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LlmFp8Config
    base_model_prefix = "model"
    _no_split_modules = ["Block"]
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.model = Decoder(config)
        # A tied head is no module of its own: the embedding's matrix is used as it is.
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return None if self.config.tie_word_embeddings else self.lm_head

    def _init_weights(self, module):
        if isinstance(module, Attention) and hasattr(module, "sinks"):
            nn.init.normal_(module.sinks, std=self.config.init_std)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.init_std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, cache=None, **_):
        if inputs_embeds is None:
            inputs_embeds = self.model.embed_tokens(input_ids)
        if cache is None:
            cache = past_key_values
        if cache is None and (use_cache or use_cache is None and not self.training):
            cache = DynamicCache()
        hidden = self.model(inputs_embeds, attention_mask, position_ids, cache)
        if isinstance(logits_to_keep, int):
            hidden = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
        else:
            hidden = hidden[:, logits_to_keep]
        tied = self.config.tie_word_embeddings
        logits = F.linear(hidden, self.model.embed_tokens.weight if tied else self.lm_head.weight)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
