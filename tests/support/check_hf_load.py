#!/usr/bin/env python3
"""Load checkpoints of ours in transformers and compare its logits with stored ones.

    python3 tests/support/check_hf_load.py DIRECTORY LOGITS.safetensors [DIRECTORY LOGITS.safetensors ...]
                                   [--tolerance 1e-5]

LOGITS.safetensors holds input_ids (B, T) int32 and logits (B, T, V) float32. transformers computes in float32
from the checkpoint's weights. The largest difference must stay below tolerance * max(1, largest logit), no
tensor may be missing or surplus, and a short text must come out of generate().

Exit status: 0 equal, 1 not, 77 torch or transformers is not installed.
"""

import argparse
import sys


def check(directory, logits_path, tolerance):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    stored = load_file(logits_path)
    ids, ours = stored["input_ids"].long(), stored["logits"]
    model, report = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if problems:
        print(f"{directory}: transformers reports {problems}")
        return False
    model.eval()
    with torch.no_grad():
        theirs = model(input_ids=ids).logits
        text = model.generate(ids[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    if ours.shape != theirs.shape:
        print(f"{directory}: logits {tuple(ours.shape)} stored, {tuple(theirs.shape)} in transformers")
        return False
    error = (ours - theirs).abs().max().item()
    bound = tolerance * max(1.0, theirs.abs().max().item())
    good = error <= bound and text.shape[1] > 4   # a NaN fails, too
    print(f"{directory}: {type(model).__name__}, largest difference {error:.3g} (bound {bound:.3g}), "
          f"{text.shape[1] - 4} tokens generated: {'equal' if good else 'DIFFERENT'}")
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
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
