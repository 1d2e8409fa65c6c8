#!/usr/bin/env python3
"""Load checkpoints of ours in transformers and compare its logits with stored ones.

    python3 tests/support/check_hf_load.py DIRECTORY LOGITS.safetensors [DIRECTORY LOGITS.safetensors ...]
                                   [--tolerance 1e-5]

LOGITS.safetensors holds input_ids (B, T) int32 and logits (B, T, V) float32. transformers computes in float32
from the checkpoint's weights. The largest difference must stay below tolerance * max(1, largest logit), no
tensor may be missing or surplus, and a short text must come out of generate(), with and without a cache.

Exit status: 0 equal, 1 not, 77 torch or transformers is not installed.
"""

import argparse
import sys


def generate(model, ids):
    """A continuation of nine tokens, and whether it is the same without a cache and beside a longer prompt."""
    import torch
    settings = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    prompts = torch.stack([torch.cat([torch.zeros_like(ids[0, :3]), ids[0, :4]]), ids[1, :7]])
    seen = torch.ones_like(prompts)
    seen[0, :3] = 0
    alone, all_seen = prompts[:1, 3:], seen[:1, 3:]
    text = model.generate(alone, attention_mask=all_seen, **settings)
    plain = model.generate(alone, attention_mask=all_seen, use_cache=False, **settings)
    batch = model.generate(prompts, attention_mask=seen, **settings)[:1, 3:]
    return text, torch.equal(text, plain) and torch.equal(text, batch[:, :text.shape[1]])


def check(directory, logits_path, tolerance):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    stored = load_file(logits_path)
    ids, ours = stored["input_ids"].long(), stored["logits"]
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=True)
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        print(f"{directory}: transformers reports {problems}")
        return False
    model.eval()
    with torch.no_grad():
        theirs = model(input_ids=ids).logits
        text, same = generate(model, ids)
    if ours.shape != theirs.shape:
        print(f"{directory}: logits {tuple(ours.shape)} stored, {tuple(theirs.shape)} in transformers")
        return False
    error = (ours - theirs).abs().max().item()
    bound = tolerance * max(1.0, theirs.abs().max().item())
    good = error <= bound and text.shape[1] > 4 and same   # a NaN fails, too
    print(f"{directory}: {type(model).__name__}, largest difference {error:.3g} (bound {bound:.3g}), "
          f"{text.shape[1] - 4} tokens generated, {'the same' if same else 'OTHERS'} without cache and in a batch: "
          f"{'equal' if good else 'DIFFERENT'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="DIRECTORY LOGITS")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    arguments = parser.parse_args()
    if len(arguments.paths) % 2:
        parser.error("each DIRECTORY needs its LOGITS")
    try:
        import torch  # noqa: F401
        import safetensors  # noqa: F401
        import transformers
    except ImportError as error:
        print(f"skipped: {error}; transformers with torch would be needed")
        return 77
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    pairs = zip(arguments.paths[::2], arguments.paths[1::2])
    results = [check(directory, logits, arguments.tolerance) for directory, logits in pairs]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
