"""Links planted at paths that the scripts write: the files that they point to must never change."""
import os
import stat

from llmfp8.comparison.report import write_text
from llmfp8.shard_format import Shard, SplitWriter
from llmfp8.support import InputError, no_follow, replacement
from tests.support.folder import FolderTest


class PlantedLinks(FolderTest):
    def setUp(self):
        super().setUp()
        self.victim = self.file("victim", "precious")
        self.out = self.folder / "out"
        self.out.mkdir()

    def tearDown(self):
        self.assertEqual(self.victim.read_text(), "precious")

    def plant(self, *names):
        for name in names:
            (self.out / name).symlink_to(self.victim)

    def test_replacement(self):
        path = self.out / "file.json"
        self.plant("file.json", "file.json.tmp", ".file.tmp.json")
        with replacement(path) as aside:
            self.assertEqual((aside.parent, aside.suffix), (self.out, ".json"))
            aside.write_text("new")
        self.assertEqual((path.is_symlink(), path.read_text()), (False, "new"))
        os.umask(mask := os.umask(0))
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o666 & ~mask)
        before = sorted(self.out.iterdir())
        with self.assertRaises(ZeroDivisionError), replacement(path):
            1 / 0   # pylint: disable=pointless-statement
        self.assertEqual(sorted(self.out.iterdir()), before)
        write_text(self.out / "file.json.tmp", "text")
        self.assertFalse((self.out / "file.json.tmp").is_symlink())

    def test_appended_files(self):
        self.plant("log.txt")
        with self.assertRaises(OSError):
            open(self.out / "log.txt", "a", opener=no_follow)

    def test_shards(self):
        names = [f"train_000000{suffix}.tmp" for suffix in (".bin", ".meta.json", ".mask")]
        self.plant(*names, "prepare.state.json.tmp")
        writer = SplitWriter(self.out, "train", 2, 1000, {}, masked=True)
        writer.write(b"\1\0" * 10, [10], b"\1" * 10)
        writer.finish()
        writer.publish()
        self.assertEqual(list(Shard(self.out / "train_000000.bin").tokens), [1] * 10)

    def test_an_interrupted_run_does_not_continue_in_a_link(self):
        writer = SplitWriter(self.out, "train", 2, 1000, {})
        writer.write(b"\1\0" * 10, [10])
        state = writer.export_state()
        writer.close()
        open_shard = self.out / "train_000000.bin.tmp"
        open_shard.rename(self.folder / "moved")
        open_shard.symlink_to(self.folder / "moved")
        with self.assertRaisesRegex(InputError, "is gone or short"):
            SplitWriter(self.out, "train", 2, 1000, {}).import_state(state)


class CutShard(FolderTest):
    def test_a_shard_that_is_cut_while_it_is_read_is_an_error(self):
        writer = SplitWriter(self.folder, "train", 2, 100000, {})
        writer.write(b"\1\0" * 50000, [50000])
        writer.finish()
        writer.publish()
        shard = Shard(self.folder / "train_000000.bin")
        os.truncate(shard.path, 1024 + 2 * 40000)
        self.assertEqual(list(shard.tokens[39990:40000]), [1] * 10)
        with self.assertRaisesRegex(InputError, "byte 81024 is missing: .* 101024 bytes .* has 81024 now"):
            list(shard.tokens)
