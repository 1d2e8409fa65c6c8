"""Models of transformers, loaded and saved: the folder alone defines the model, and a checkpoint has all that the
folder had. Standard library only."""
import ast
import json
import os
import shutil
import unittest
from pathlib import Path

from tests.support.ranks import ENVIRONMENT, HAVE_RANKS, MPIRUN
from tests.support.run_command import run_command
from tests.support.train import GPT2, LLAMA, ROOT, TrainTest, records

FIXTURES = os.path.join(ROOT, "tests", "fixtures")
BROUGHT = {"tokenizer.json": "{}", "tokenizer_config.json": '{"chat_template": "x"}', "special_tokens_map.json": "{}",
           "tokenizer.model": "\0\1", "chat_template.jinja": "{{ messages }}", "merges.txt": "a b",
           "generation_config.json": '{"eos_token_id": [5, 9, 11], "top_p": 0.9}'}
# For each fixture the fields of its config.json that a checkpoint must have with equal values; test_hf_config.cpp has
# every class.
FAMILIES = {
    "gpt2": ["model_type", "n_embd", "n_head", "n_inner"],
    "llama": ["model_type", "rope_parameters", "tie_word_embeddings"],
    "qwen2_window": ["model_type", "use_sliding_window", "sliding_window", "max_window_layers"],
    "qwen3_bias_window": ["model_type", "attention_bias", "sliding_window"],
    "qwen3_layers": ["model_type", "layer_types", "sliding_window", "max_window_layers"],
    "ministral": ["model_type", "layer_types", "sliding_window"],
    "olmoe": ["model_type", "num_experts", "num_experts_per_tok", "norm_topk_prob"],
    "olmo2": ["model_type", "attention_bias", "num_key_value_heads"],
    "olmo3": ["model_type", "layer_types", "sliding_window"],
    "gemma3": ["model_type", "layer_types", "sliding_window", "rope_parameters", "query_pre_attn_scalar",
               "hidden_activation"],
    "gemma2": ["model_type", "layer_types", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"],
    "phi3": ["model_type", "rope_parameters", "sliding_window"],
    "granite": ["model_type", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
    "mixtral": ["model_type", "num_local_experts", "num_experts_per_tok"],
    "gpt_oss_mxfp4": ["model_type", "layer_types", "sliding_window", "num_local_experts", "attention_bias"],
}


def config_of(directory):
    return json.loads(Path(directory, "config.json").read_text())


class ModelsTest(TrainTest):
    def bring(self, fixture, name="model"):
        """A copy of a fixture with the files of a published model; returns its path."""
        model = self.path(name)
        shutil.copytree(os.path.join(FIXTURES, fixture), model, dirs_exist_ok=True)
        for file, text in BROUGHT.items():
            Path(model, file).write_text(text)
        config = config_of(model) | {"bos_token_id": 2, "eos_token_id": [5, 9, 11], "pad_token_id": 1}
        Path(model, "config.json").write_text(json.dumps(config))
        return model

    def train(self, *options, expect=0, launcher=()):
        return run_command([*launcher, LLAMA, "--train-data", self.path("train_0.bin"), "--seq-length", "16",
                            "--micro-batch-size", "2", "--dtype", "fp32", *options], expect, env=ENVIRONMENT)

    def check_brought(self, checkpoint):
        for file, text in BROUGHT.items():
            path = os.path.join(checkpoint, file)
            self.assertEqual(Path(path).read_text(), text, path)
        config = config_of(checkpoint)
        self.assertEqual([config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")],
                         [2, [5, 9, 11], 1])

    def test_a_model_is_loaded_and_saved_by_its_folder_alone(self):
        for fixture, fields in FAMILIES.items():
            with self.subTest(fixture):
                model = self.bring(fixture, fixture)
                out = self.path(fixture + "-out")
                done = self.train("--load", model, "--train-iters", "2", "--save", out)
                notes = [r["text"] for r in records(os.path.join(out, "log.jsonl"), "event")]
                self.assertEqual(any("a window of" in note for note in notes), "sliding_window" in fields)
                saved = os.path.join(out, "step-00000002")
                self.assertEqual({name: config_of(saved)[name] for name in fields},
                                 {name: config_of(model)[name] for name in fields})
                self.check_brought(saved)
                self.train("--train-iters", "3", "--save", out, "--resume", "auto")

    def test_what_a_model_brought_goes_from_run_to_run(self):
        model, out = self.bring("llama"), self.path("out")
        self.train("--load", model, "--train-iters", "2", "--save", out)
        for file in BROUGHT:   # the next run reads the checkpoint, not the folder
            os.remove(os.path.join(model, file))
        self.train("--load", model, "--train-iters", "4", "--save", out, "--resume", "auto", "--keep", "1")
        self.assertEqual(self.checkpoints("out"), ["step-00000004"])
        self.check_brought(os.path.join(out, "step-00000004"))
        # A new run from the checkpoint's weights. test_model_extras.cpp has other tokenizers and chat templates.
        self.train("--load", os.path.join(out, "step-00000004"), "--train-iters", "1", "--save", self.path("new"))
        self.check_brought(self.path("new", "step-00000001"))
        # The chat template is that of the data.
        with open(self.path("train_0.meta.json"), "w") as file:
            json.dump({"tokenizer": {"chat_template": "{{ trained }}", "separator": 2, "end_of_turn": 7}}, file)
        done = self.train("--load", os.path.join(out, "step-00000004"), "--train-iters", "1", "--save",
                          self.path("chat"), "--resume", "auto")
        self.assertIn("checkpoints have the chat template of the training data\n", done.stdout)
        self.assertEqual(config_of(self.path("chat", "step-00000001"))["eos_token_id"], [7, 5, 9, 11])

    @unittest.skipUnless(HAVE_RANKS, "no mpirun")
    def test_two_ranks_keep_it_too_and_say_what_is_wrong_with_it(self):
        model, two = self.bring("llama"), [*MPIRUN, "-np", "2"]
        self.train("--load", model, "--train-iters", "1", "--save", self.path("out"), launcher=two)
        self.check_brought(self.path("out", "step-00000001"))
        # The same command on one rank has the global batch of two, and the checkpoint alone has the shape.
        done = self.train("--load", model, "--train-iters", "2", "--save", self.path("out"), "--resume", "auto")
        self.assertRegex(done.stdout, "note: not given, so as in .*/step-00000001: --global-batch-size 4\n")
        done = self.train("--train-iters", "3", "--resume", self.path("out", "step-00000002"), launcher=two)
        self.assertRegex(done.stdout, "note: not given, so as in .*/step-00000002: --num-layers 2 --hidden-size 64 ")
        with open(os.path.join(model, "config.json"), "w") as out:
            json.dump(config_of(os.path.join(FIXTURES, "llama")) | {"eos_token_id": "</s>"}, out)
        refused = self.train("--load", model, "--train-iters", "1", "--save", self.path("no"), launcher=two,
                             expect=2)
        self.assertIn('"eos_token_id"', refused.stderr)
        self.assertFalse(os.path.exists(self.path("no")))

    def test_a_model_of_our_own_brings_its_code(self):
        """The Python files that a checkpoint's config.json names for transformers exist, compile, and read every
        field."""
        own = ["--normalization", "RMSNorm", "--attention-sinks", "--sliding-window", "5,0"]
        self.run_train(GPT2, "--train-iters", "1", *own, "--save", self.path("own"))
        saved = self.path("own", "step-00000001")
        config, classes = config_of(saved), {}
        for name in ("configuration_llmfp8.py", "modeling_llmfp8.py"):
            tree = ast.parse(Path(saved, name).read_text())
            classes |= {f"{name[:-3]}.{node.name}": node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.assertEqual(set(config["auto_map"]), {"AutoConfig", "AutoModelForCausalLM"})
        for named in config["auto_map"].values():
            self.assertIn(named, classes)
        self.assertEqual(config["architectures"], ["LlmFp8ForCausalLM"])
        self.assertEqual(config["window"], [5, 0])
        init = next(node for node in classes[config["auto_map"]["AutoConfig"]].body
                    if isinstance(node, ast.FunctionDef) and node.name == "__init__")
        general = {"architectures", "model_type", "auto_map", "torch_dtype", "dtype", "bos_token_id", "eos_token_id",
                   "pad_token_id"}
        self.assertEqual({argument.arg for argument in init.args.args} - {"self"}, set(config) - general)
        # transformers has a class for this shape, so the checkpoint contains no Python files.
        self.run_train(GPT2, "--train-iters", "1", "--save", self.path("gpt2"))
        self.assertFalse([name for name in os.listdir(self.path("gpt2", "step-00000001")) if name.endswith(".py")])
        # The run is resumed, and its checkpoint is loaded again.
        self.run_train(GPT2, "--train-iters", "2", *own[:3], "--save", self.path("own"), "--resume", "auto")
        refused = self.run_train(GPT2, "--train-iters", "3", *own[:4], "5", "--save", self.path("own"), "--resume",
                                 "auto", expect=2)
        self.assertIn("--sliding-window: 5,0 in the checkpoint, 5 now", refused.stderr)
        self.run_train(GPT2, "--train-iters", "1", *own, "--load", saved)
