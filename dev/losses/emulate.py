#!/usr/bin/env python3
"""What each rounding of FP8 training costs, emulated in PyTorch: which operand, which matmul, which kind of scale.

    dev/losses/emulate.py --model DIR --text DIR --set 'forward=fx:e4m3 fw:e4m3' --set 'dy-sr=@tensor dy:e5m2+sr'

A Llama trains on in BF16 with master weights in FP32, as train_llama does, and the operands of its linear layers are
rounded to FP8 and back where a set says so. With it one sees what a recipe would give before its kernels exist; the
sums of products stay in FP32, as with precise accumulation. A set is a list of words:

    OPERAND:FORMAT[/SCALE][+sr][*2]    for all linear layers, or LAYER.OPERAND:... for qkv, proj, up, down or head;
                                       3.up or 0-2.* names them in blocks of these numbers
    @tensor, @block, @row              the recipes tensorwise and blockwise, and E4M3 with a scale per row
    center, LAYER.center               x without its mean over the tokens is rounded; what the mean adds is exact
    LAYER.exact:N                      in the forward matmul the N channels that would add most error are exact
    LAYER.hadamard:N                   before the forward matmul x and w are turned in groups of N = 2^i channels
    final:X                            without any rounding in the last X (share) of the steps

Operands: fx, fw of the forward matmul, dy, dw of the input's gradient, gy, gx of the weight's. Formats: e4m3, e5m2,
int8, none. Scales: tensor (default), row (along the summed dimension), block (1 x 128 along it, 128 x 128 of weights;
powers of two). +sr rounds stochastically, *2 takes the sum of two rounded terms. Prints, as each set ends, its
validation loss with the rounding and without, and the gaps to BF16. DIR of the text holds train/*.bin and valid/*.bin
of machine_text.py; the model is a Hugging Face folder (real_weights.py makes both). Needs PyTorch and safetensors.
"""
import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Type, largest, dropped bits of FP32's mantissa.
FORMATS = {"e4m3": (E4M3, 448.0, 20), "e5m2": (E5M2, 57344.0, 21), "int8": (torch.int8, 127.0, None)}
OPERANDS = "fx fw dy dw gy gx".split()
KINDS = {"qkv": ("q_proj", "k_proj", "v_proj"), "proj": ("o_proj",), "up": ("gate_proj", "up_proj"),
         "down": ("down_proj",)}
RECIPES = {"@tensor": "fx:e4m3 fw:e4m3 dy:e5m2 dw:e4m3 gy:e5m2 gx:e4m3",
           "@block": "fx:e4m3/block fw:e4m3/block dy:e4m3/block dw:e4m3/block gy:e4m3/block gx:e4m3/block",
           "@row": "fx:e4m3/row fw:e4m3/row dy:e5m2/row dw:e4m3/row gy:e5m2/row gx:e4m3/row"}
WORD = re.compile(r"(?:([\w*.-]+)\.)?(f[xw]|d[yw]|g[xy]):(none|e4m3|e5m2|int8)(?:/(tensor|row|block))?(\+sr)?(\*2)?")
SPECIAL = re.compile(r"(?:([\w*.-]+)\.)?(center|exact|hadamard)(?::(\d+))?")


def rounded(t, kind, scale, stochastic, square):
    """t [rows, summed dimension], rounded to FP8 and back, in FP32."""
    dtype, most, bits = FORMATS[kind]
    shape, t = t.shape, t.float()
    if scale == "block":   # of whole blocks
        t = t.view(-1, 128 if square else 1, shape[1] // 128, 128)
        factor = most / t.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
        factor = factor if kind == "int8" else torch.exp2(torch.floor(torch.log2(factor)))
    else:
        factor = most / (t.abs().amax() if scale == "tensor" else t.abs().amax(-1, keepdim=True)).clamp(min=1e-30)
    x = t * factor
    if kind == "int8":
        x = torch.floor(x + torch.rand_like(x)) if stochastic else x.round()
    elif stochastic:
        noise = torch.randint(0, 1 << bits, x.shape, dtype=torch.int32, device=x.device)
        x = ((x.view(torch.int32) + noise) & ~((1 << bits) - 1)).view(torch.float32)
    return (x.clamp(-most, most).to(dtype).float() / factor).view(shape)


@torch.compile(dynamic=False)
def quantized(t, kind, scale, stochastic, terms, square):
    """t [rows, summed dimension] as the matmul sees it, BF16."""
    first = rounded(t, kind, scale, stochastic, square)
    if terms == 2:
        first = first + rounded(t.float() - first, kind, scale, stochastic, square)
    return first.to(torch.bfloat16)


def operand(t, how, square=False):
    if not how:
        return t
    if how[1] != "block":
        return quantized(t.contiguous(), *how, square)
    rows, width = t.shape   # padded here: TorchInductor 2.15 reads beyond padding in what it compiles for CPUs
    return quantized(F.pad(t, (0, -width % 128, 0, -rows % 128)), *how, square)[:rows, :width]


def turned(t, width):
    """t times an orthogonal Hadamard matrix in each group of so many channels, at most as many as divide them."""
    groups = t.view(t.shape[0], -1, math.gcd(width, t.shape[1]))
    matrix = torch.ones(1, 1, dtype=t.dtype, device=t.device)
    while matrix.shape[0] < groups.shape[2]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (groups @ matrix).view(t.shape) * groups.shape[2] ** -0.5


class Linear(torch.autograd.Function):
    """y = x w^T of BF16 x [rows, in] and w [out, in]; hows: of each operand, or None."""

    @staticmethod
    def forward(ctx, x, w, hows):
        mean = x.float().mean(0) if hows["center"] else None
        if hows["center"]:
            x = (x.float() - mean).to(x.dtype)
        ctx.save_for_backward(x, w, mean)
        ctx.hows, whole = hows, w
        if hows["hadamard"]:
            x, w = turned(x, hows["hadamard"]), turned(w, hows["hadamard"])
        a, b = operand(x, hows["fx"]), operand(w, hows["fw"], True)
        if hows["exact"]:   # a second term of x and w in these channels
            worst = (x.float().square().mean(0) * w.float().square().sum(0)).topk(hows["exact"]).indices
            a, b = (torch.cat((a, (x - a)[:, worst], a[:, worst]), 1),
                    torch.cat((b, b[:, worst], (w - b)[:, worst]), 1))
        y = a @ b.t()
        return (y.float() + mean @ whole.float().t()).to(y.dtype) if hows["center"] else y

    @staticmethod
    def backward(ctx, dy):
        (x, w, mean), hows = ctx.saved_tensors, ctx.hows
        dx = operand(dy, hows["dy"]) @ operand(w.t(), hows["dw"], True).t()
        dw = operand(dy.t(), hows["gy"]) @ operand(x.t(), hows["gx"]).t()
        return dx, dw if mean is None else (dw.float() + torch.outer(dy.float().sum(0), mean)).to(dw.dtype), None


def parse(words):
    """([(blocks or None, layer or *, operand, how)], share of the steps at the end without rounding)."""
    rules, final = [], 0.0
    for word in words.split():
        if word in RECIPES:
            rules += parse(RECIPES[word])[0]
        elif word.startswith("final:"):
            final = float(word[6:])
        elif SPECIAL.fullmatch(word):
            where, what, count = SPECIAL.fullmatch(word).groups()
            blocks, _, layer = (where or "*").rpartition(".")
            rules.append((blocks or None, layer, what, int(count or 1)))
        else:
            found = WORD.fullmatch(word)
            if not found:
                raise SystemExit(f"--set: {word} is not a word of a set; --help lists them")
            where, name, kind, scale, stochastic, double = found.groups()
            blocks, _, layer = (where or "*").rpartition(".")
            how = None if kind == "none" else (kind, scale or "tensor", bool(stochastic), 2 if double else 1)
            rules.append((blocks or None, layer, name, how))
    return rules, final


def hows_of(rules, block, layer):
    """The operands of one linear layer: later rules win. The head is meant only by its name."""
    hows = dict.fromkeys((*OPERANDS, "center", "exact", "hadamard"))
    for blocks, name, which, how in rules:
        low, _, high = (blocks or "").partition("-")
        if (name == layer or name == "*" and layer != "head") and (not blocks or int(low) <= block <= int(high or low)):
            hows[which] = how
    return hows


class Llama:
    def __init__(self, folder, device):
        config = json.loads((folder / "config.json").read_text())
        self.heads, self.groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.hidden, self.layers, self.eps = config["hidden_size"], config["num_hidden_layers"], config["rms_norm_eps"]
        self.theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            weights.update(load_file(path))

        def get(name):
            return weights[f"model.{name}.weight"].to(device, torch.float32)

        self.params = {"embed": get("embed_tokens"), "norm": get("norm")}
        if not config["tie_word_embeddings"]:
            self.params["head"] = weights["lm_head.weight"].to(device, torch.float32)
        for i in range(self.layers):
            at = f"layers.{i}."
            self.params[at + "norm1"], self.params[at + "norm2"] = (
                get(at + "input_layernorm"), get(at + "post_attention_layernorm"))
            for kind, names in KINDS.items():
                part = "self_attn" if kind in ("qkv", "proj") else "mlp"
                self.params[at + kind] = torch.cat([get(f"{at}{part}.{name}") for name in names])
        for p in self.params.values():
            p.requires_grad_()
        self.rope = {}

    def turned(self, x):
        """Rope of x [B, heads, T, head dim]."""
        length, size = x.shape[-2:]
        if length not in self.rope:
            angles = torch.outer(torch.arange(length, device=x.device, dtype=torch.float32), self.theta ** (
                -torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)).repeat(1, 2)
            self.rope[length] = angles.cos(), angles.sin()
        cos, sin = self.rope[length]
        half = torch.cat((-x[..., size // 2:], x[..., :size // 2]), -1)
        return (x * cos + half * sin).to(x.dtype)

    def norm(self, x, name):
        return F.rms_norm(x, (self.hidden,), self.params[name].to(x.dtype), self.eps)

    def linear(self, x, rules, block, layer):
        name = f"layers.{block}.{layer}" if block is not None else "head" if "head" in self.params else "embed"
        return Linear.apply(x, self.params[name].to(torch.bfloat16), hows_of(rules, block, layer))

    def block(self, x, rules, i, batch, length):
        q, k, v = (self.linear(self.norm(x, f"layers.{i}.norm1"), rules, i, "qkv")
                   .view(batch, length, self.heads + 2 * self.groups, -1).transpose(1, 2)
                   .split((self.heads, self.groups, self.groups), 1))
        a = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.linear(a.transpose(1, 2).reshape(batch * length, -1), rules, i, "proj")
        gate, up = self.linear(self.norm(x, f"layers.{i}.norm2"), rules, i, "up").chunk(2, -1)
        return x + self.linear(F.silu(gate) * up, rules, i, "down")

    def loss(self, tokens, rules):
        """Mean loss of tokens [B, T + 1]."""
        batch, length = tokens.shape[0], tokens.shape[1] - 1
        x = F.embedding(tokens[:, :-1].reshape(-1), self.params["embed"].to(torch.bfloat16))
        for i in range(self.layers):
            x = self.block(x, rules, i, batch, length)
        logits = self.linear(self.norm(x, "norm"), rules, None, "head")
        return F.cross_entropy(logits.float(), tokens[:, 1:].reshape(-1))


def shards(folder, device):
    """All tokens of llm.c's shards."""
    if not any(folder.glob("*.bin")):
        raise SystemExit(f"--text: {folder} has no *.bin; real_weights.py makes them in logs/real-weights/text-*")
    parts = [torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.int16)[512:]
             for path in sorted(folder.glob("*.bin"))]
    return torch.cat(parts).to(device, torch.int32) & 0xffff


def samples(tokens, length, order):
    at = (order[:, None] * length + torch.arange(length + 1)).to(tokens.device)
    return tokens[at].long()


@torch.no_grad()
def validation(model, tokens, rules, args):
    count = args.valid_tokens // args.seq_length // args.batch * args.batch
    losses = [model.loss(samples(tokens, args.seq_length, order), rules)
              for order in torch.arange(count).split(args.batch)]
    return torch.stack(losses).mean().item()


def train(words, seed, args, text):
    """(loss with the rounding, without it, seconds) after the steps."""
    (rules, final), begin = parse(words), time.monotonic()
    torch.manual_seed(seed)
    model = Llama(args.model, args.device)
    decayed = [p for p in model.params.values() if p.dim() == 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1},
                                   {"params": [p for p in model.params.values() if p.dim() < 2], "weight_decay": 0.0}],
                                  lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")
    order = torch.randperm(len(text["train"]) // args.seq_length - 1,
                           generator=torch.Generator().manual_seed(seed)).split(args.batch)
    for step in range(args.train_iters):
        now = [] if step >= args.train_iters * (1 - final) - 1e-9 else rules
        for micro in range(args.accumulate):
            tokens = samples(text["train"], args.seq_length, order[step * args.accumulate + micro])
            (model.loss(tokens, now) / args.accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.params.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.train_iters)))
        optimizer.step()
        optimizer.zero_grad()
    plain = validation(model, text["valid"], [], args)
    loss = validation(model, text["valid"], rules, args) if rules and not final else plain
    return loss, plain, time.monotonic() - begin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--text", type=Path, required=True, metavar="DIR")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=WORDS")
    parser.add_argument("--seeds", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2],
                        help="of BF16 runs; the sets have the first (default 1,2)")
    parser.add_argument("--bf16-loss", type=float, metavar="X", help="known: no BF16 run")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a micro-batch (default 16)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step (default 2)")
    parser.add_argument("--train-iters", type=int, default=120)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--valid-tokens", type=int, default=1_280_000)
    parser.add_argument("--minutes", type=float, default=9, help="begin no run that would end later (default 9)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        parser.error(f"--model {args.model}: no config.json: a Hugging Face folder is needed")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is found (--device cpu is for tiny trials)")
    for entry in args.set:
        parse(entry.partition("=")[2])   # before the first run
    end, torch._dynamo.config.recompile_limit = time.monotonic() + 60 * args.minutes, 10_000
    text = {part: shards(args.text / part, args.device) for part in ("train", "valid")}
    runs = [(f"BF16, seed {seed}", "", seed) for seed in args.seeds if args.bf16_loss is None]
    runs += [(name, words, args.seeds[0]) for name, _, words in (entry.partition("=") for entry in args.set)]
    base, longest = args.bf16_loss, 0
    print(f"{'set':40} {'rounded':>8} {'gap':>8} {'BF16':>8} {'gap':>8}      s", flush=True)
    for name, words, seed in runs:
        if time.monotonic() + longest > end:
            print(f"{name:40} left: no time")
            continue
        loss, plain, seconds = train(words, seed, args, text)
        base, longest = base or plain, max(longest, seconds)
        gaps = [f"{100 * (value / base - 1):+7.3f}%" for value in (loss, plain)]
        print(f"{name:40} {loss:8.4f} {gaps[0]} {plain:8.4f} {gaps[1]} {seconds:6.1f}", flush=True)


if __name__ == "__main__":
    main()
