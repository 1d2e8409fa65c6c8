"""No script of recipes/ or launch/ executes the content of an environment variable."""
import os
import re
import subprocess

from tests.support.folder import FolderTest
from tests.support.run_command import run_command

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RECIPES, LAUNCH = (os.path.join(ROOT, "scripts", folder) for folder in ("recipes", "launch"))
# Commands in places where bash would run them: in arithmetic, and where a value is parsed again.
PAYLOADS = ["PATH[$(touch {ran})]", "1$(touch {ran})`touch {ran}`;touch {ran};'\";touch {ran};#\ntouch {ran}\n"]
RECIPE_VARIABLES = {"DATA", "TOKENIZER", "MODEL", "RANKS", "LLMC_BUILD", "CDPATH"}
LAUNCH_VARIABLES = {"MPIRUN", "SLURM_JOB_ID", "SECONDS", "EPOCHREALTIME"}
SLURM_VARIABLES = {"SLURM_JOB_ID", "SLURM_NNODES", "SLURM_GPUS_PER_NODE", "SLURM_GPUS", "SLURM_GPUS_ON_NODE",
                   "SLURM_GPUS_PER_TASK", "SLURM_NTASKS"}
# Variables that are passed to mpirun or srun, or that bash itself sets.
NOT_READ = {"LLMFP8_HEARTBEATS", "BASH_SOURCE", "BASH_REMATCH", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}
MPIRUN = "#!/bin/bash\nprintf '%s\\n' \"$@\"\n"
SCONTROL = "#!/bin/bash\necho \"   TresPerNode=$GRES\"\n"


class ScriptVariables(FolderTest):
    def setUp(self):
        super().setUp()
        self.dir, self.ran = str(self.folder), self.folder / "ran"
        for name, text in (("train_llama", MPIRUN), ("train_gpt2", MPIRUN), ("mpirun", MPIRUN), ("srun", MPIRUN),
                           ("scontrol", SCONTROL)):
            self.file(name, text).chmod(0o755)

    def call(self, *command, **environment):
        plain = {"PATH": f"{self.dir}:{os.environ['PATH']}", "LLMC_BUILD": self.dir, "HOME": self.dir}
        return run_command(command, None, cwd=self.dir if command[0].startswith("/") else ROOT,
                           stdin=subprocess.DEVNULL, env={**plain, **environment})

    def nothing_ran(self, variable, *command, **environment):
        """[(value, result of the command with it)]."""
        found = []
        for value in (payload.format(ran=self.ran) for payload in PAYLOADS):
            done = self.call(*command, **environment, **{variable: value})
            self.assertFalse(os.path.exists(self.ran), f"{variable}={value} was run")
            self.assertNotIn("syntax error", done.stderr)
            found.append((value, done))
        return found

    def test_every_variable_that_a_script_reads_is_here(self):
        known = RECIPE_VARIABLES | LAUNCH_VARIABLES | SLURM_VARIABLES | NOT_READ
        for folder in (RECIPES, LAUNCH):
            for name in os.listdir(folder):
                with open(os.path.join(folder, name), encoding="utf-8") as script:
                    text = re.sub(r"(?m)^\s*#.*", "", script.read())
                found = set(re.findall(r"\$\{?!?([A-Z][A-Z0-9_]+)\b", text)) | set(re.findall(r"\b(SLURM_\w+)", text))
                found |= set(re.findall(r"\$\(\(.*?\b([A-Z][A-Z0-9_]+)\b", text))
                self.assertLessEqual(found, known, name)

    def test_recipes(self):
        for recipe in ("finetune_llama31_8b_bf16.sh", "train_gpt2_124M_fp8.sh"):
            for options in ([], ["--dry-run"]):
                for variable in sorted(RECIPE_VARIABLES):
                    for value, done in self.nothing_ran(variable, os.path.join(RECIPES, recipe), *options):
                        if variable == "RANKS":
                            self.assertEqual(done.returncode, 2, done.stderr)
                            self.assertRegex(done.stderr, r"^\w+: RANKS=\$?'.*: give the number of GPUs, from 1")
                        elif variable == "MODEL" and "finetune" in recipe and options == []:
                            self.assertIn("no Hugging Face model in " + value, done.stderr)

    def test_ranks_are_a_number(self):
        recipe = os.path.join(RECIPES, "finetune_llama31_8b_bf16.sh")
        for ranks in ("0", "-1", "08", "1e3", "8 ", "8\n", "0x8", "99999999999999999999", "PATH", "ranks", "*"):
            with self.subTest(ranks):
                done = self.call(recipe, "--dry-run", RANKS=ranks)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                self.assertIn("give the number of GPUs", done.stderr)
        done = self.call(recipe, "--dry-run", RANKS="16")
        self.assertIn("--global-batch-size\n512\n", done.stdout)

    def test_the_launcher(self):
        launcher = os.path.join(LAUNCH, "launch_mpi.sh")
        for variable in sorted(LAUNCH_VARIABLES):
            for _, done in self.nothing_ran(variable, launcher, "-np", "1", "true"):
                self.assertEqual(done.returncode, 2 if variable == "MPIRUN" else 0, done.stderr)

    def test_jobs(self):
        plain = {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4"}
        for script, launched in (("train.sbatch", "--kill-on-bad-exit=1"), ("train_mpirun.sbatch", "-np\n8\n")):
            command = ["bash", f"scripts/launch/{script}", "true"]
            self.assertIn(launched, self.call(*command, **plain).stdout)
            for variable in sorted(SLURM_VARIABLES | {"GRES"}):
                others = {k: v for k, v in plain.items() if k != variable}
                for value, done in self.nothing_ran(variable, *command, **others):
                    if variable in ("SLURM_NNODES", "SLURM_GPUS_ON_NODE"):
                        self.assertEqual(done.returncode, 2, done.stderr)
                        self.assertRegex(done.stderr, rf"^error: {variable}=\$?'.*: not a count from 1; ")
