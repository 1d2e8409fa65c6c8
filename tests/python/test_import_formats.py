"""scripts/import_config on files of torchtitan (TOML), llm.c (scripts) and nanoGPT (NAME = value)."""

from llmfp8.importer.engine import is_open
from tests.support.import_case import LLMC, MEGATRON, ImportCase, import_file


class ImportFormatsTest(ImportCase):
    def test_torchtitan_files_and_options(self):
        for text, expected in (
                ('[model]\nflavor = "8B"\n[training]\nsteps = 100\n[lr_scheduler]\nwarmup_steps = 20\n'
                 'decay_ratio = 0.1\nlr_min = 0.5',
                 {"lr-decay-style": "wsd", "lr-wsd-decay-iters": 10, "lr-warmup-iters": 20, "min-lr": 4e-4, "lr": 8e-4,
                  "fp8-recipe": None}),
                ('[training]\nsteps = 100\n[lr_scheduler]\ndecay_ratio = 0.1\ndecay_type = "cosine"',
                 {"lr-decay-style": "cosine", "lr-wsd-decay-iters": None}),
                ('[model]\nconverters = "float8"\n[float8]\nrecipe_name = "rowwise"', {"fp8-recipe": "tensorwise"}),
                ('[model]\nconverters = []\n[float8]\nenable_fsdp_float8_all_gather = true', {"fp8-recipe": None}),
                ('[float8]\nenable_float8_linear = true\n[training]\nseq_len = 16384',
                 {"fp8-recipe": "tensorwise", "max-position-embeddings": 16384}),
                ('training = {steps = 7, seq_len = 64}\njob.dump_folder = "o"\ncheckpoint.enable = true',
                 {"train-iters": 7, "seq-length": 64, "save": "o/checkpoint", "resume": "auto"})):
            with self.subTest(text):
                run = import_file(self.folder, "a.toml", text)
                self.assertEqual({option: run.get(option) for option in expected}, expected)
                self.assert_accepted({**run.options(), "model": "llama3-8B"}, "llama")
        run = import_file(self.folder, "a.sh", "torchrun --nproc_per_node 8 -m torchtitan.train --training.steps 9 "
                          "--parallelism.tensor_parallel_degree=2")
        self.assertEqual((run.get("train-iters"), is_open(run)), (9, True))
        self.assertTrue(any(note.startswith("--model NAME") for note in run.notes))
        run = import_file(self.folder, "a.toml", "[training]\nsteps = 9\n[model]\nvocab_size = 7")
        self.assertIn("not in our tables", run.findings[-1].fact)   # no row with a star matches a setting that matters

    def test_launch_scripts_of_llmc(self):
        for more, expected in (("-d 8192 -e d24", {"global-batch-size": 8, "model": "gpt2-350M", "min-lr": 3e-4}),
                               ("-x -1 -e gpt2:d6", {"epochs": 1, "num-layers": 6, "num-attention-heads": 6}),
                               ("-x 5 -q 0.0 -l 1e-3", {"train-iters": 5, "epochs": None, "min-lr": 0, "lr": 1e-3}),
                               ("-m 7 -z 2 -y 0 -ge 0", {"zero": 2, "resume": None})):
            with self.subTest(more):
                run = import_file(self.folder, "a.sh", LLMC + more)
                self.assertEqual({option: run.get(option) for option in expected}, expected)
                self.assertEqual((run.ranks, is_open(run)), (4, False), [f.fact for f in run.findings])
                options = {k: v for k, v in run.options().items() if k not in ("train-data", "epochs")}
                self.assert_accepted({**options, "train-iters": 5}, "gpt2")   # there is no a.bin
        self.assertTrue(is_open(import_file(self.folder, "a.sh", LLMC + "-e gpt2_124M_bf16.bin")))

    def test_conditions_about_commands_of_the_shell_decide_nothing(self):
        loop = "while true; do\nif [ -f x ]; then\n  {}\nfi\n" + MEGATRON + "\ndone"
        self.assertFalse(is_open(import_file(self.folder, "a.sh", loop.format("break"))))
        self.assertTrue(is_open(import_file(self.folder, "a.sh", loop.format("A=1"))))

    def test_lines_of_python_are_read_and_never_run(self):
        mark = self.folder / "mark"
        text = f"open({str(mark)!r}, 'w')\nbatch_size = 3 * 4\nn_layer = 2   # a comment\n" \
               f"max_iters = open({str(mark)!r}, 'w') or 7\nmin_lr = 3e-5\ngradient_accumulation_steps = 2"
        run = import_file(self.folder, "a.py", text)
        self.assertFalse(mark.exists())
        self.assertEqual([run.get(o) for o in ("micro-batch-size", "num-layers", "min-lr", "global-batch-size")],
                         [12, 2, 3e-5, 24])
        told = {f.line: f.fact for f in run.findings if f.action == "not understood"}
        self.assertEqual(set(told), {1, 4})
        self.assertIn("--set max_iters=VALUE", told[4])
        self.assertEqual(import_file(self.folder, "a.py", text, {"max_iters": "8"}).get("train-iters"), 8)
