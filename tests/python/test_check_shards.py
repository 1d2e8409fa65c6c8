"""data/check_shards.py: every id of every shard, the sidecars, and errors that only several shards together show."""
import array
import json
import struct
import sys
import unittest
import unittest.mock

import check_shards
from tests.support.data_scripts import ScriptTest, has, lines


class CheckShards(ScriptTest):
    def check(self, *arguments, damaged="", **keywords):
        """Returns the output. damaged: the expected text on the only damaged shard."""
        text = self.script("check_shards.py", "--workers", "1", *arguments, code=2 if damaged else 0, **keywords)
        self.assertEqual(text.count("DAMAGED"), 1 if damaged else 0, text)
        self.assertIn(damaged, text)
        return text

    def made(self):
        """Two shards of training and one of validation."""
        self.prepare_bytes("--valid-fraction", "0.2", "--shard-tokens", "70000", self.file("a.txt", lines(3000)))
        shards = sorted(self.out.glob("*.bin"))
        self.assertGreater(len(shards), 2)
        return shards

    def test_whole_shards(self):
        shards = self.made()
        text = self.check(*shards)
        documents = [json.loads(path.with_suffix(".meta.json").read_text())["documents"] for path in shards]
        for path, count in zip(shards, documents):
            self.assertIn(f"whole {path}: ", text)
            self.assertIn(f" tokens, {count} documents, ids to 256\n", text)
        total = sum((path.stat().st_size - 1024) // 2 for path in shards)
        self.assertIn(f"{len(shards)} shards, 0 damaged, {total} tokens in the others\n", text)
        if has("numpy"):   # the result must be the same without numpy
            with unittest.mock.patch.dict(sys.modules, numpy=None):
                self.assertEqual(self.check(*shards), text)
        self.assertEqual(self.check("--workers", "3", *shards, packages=self.folder), text)

    def test_the_first_bad_id_is_named(self):
        with unittest.mock.patch.object(check_shards, "CHUNK", 7):   # at the edges of chunks and inside of them
            for wide in (False, True):
                for at in (0, 6, 7, 20, 29):
                    tokens = [99] * 30
                    tokens[at] = 100
                    tokens[29] = max(tokens[29], 60000)
                    if at != 29:
                        tokens[at + 1] = 101
                    path = self.shard(tokens, wide=wide)
                    byte = 1024 + at * (4 if wide else 2)
                    self.check("--vocab-size", "100", path, damaged=f"{path}: byte {byte} (token {at}): id "
                               f"{tokens[at]} is not below the vocabulary size 100")
                    self.check("--vocab-size", "60001", path)
        path = self.shard([2 ** 32 - 1], wide=True)
        self.check("--vocab-size", str(2 ** 31), path, damaged="id 4294967295 is not below")
        self.assertIn("(no .meta.json, ids not held against a vocabulary)", self.check(path))

    def test_a_pattern_in_quotes_is_what_the_trainer_would_read(self):
        path = self.shard([1, 2, 3])
        self.file("train.mask", b"no shard")
        self.assertIn("1 shard, 0 damaged", self.check(self.folder / "*"))
        self.assertIn(str(path), self.check(self.folder / "*.bin"))
        self.check(self.folder / "none*.bin", damaged=f"{self.folder}/none*.bin: cannot open: No such file")
        self.file("a[1].bin", b"")   # a name is taken as it is before it is a pattern
        self.check(self.folder / "a[1].bin", damaged="a[1].bin: the file is empty")

    def test_a_headerless_file_and_its_vocabulary(self):
        path = self.file("raw.bin", array.array("H", [1, 2, 50257]).tobytes())
        self.check(path, damaged="wrong magic")
        self.check("--token-dtype", "uint16", "--vocab-size", "50257", path, damaged="byte 4 (token 2): id 50257")
        self.check("--token-dtype", "uint16", "--vocab-size", "50258", path)

    def test_any_flipped_bit_is_found_and_the_others_are_still_read(self):
        shards = self.made()
        good = shards[1].read_bytes()
        for at in (0, 4, 9, 700, 1024, len(good) // 2, len(good) - 1):
            for bit in (0, 7):
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                shards[1].write_bytes(bad)
                text = self.check(*shards, damaged=f"DAMAGED {shards[1]}: ")
                self.assertEqual(text.count("whole "), len(shards) - 1)
        shards[1].write_bytes(good[:-2])
        self.check(*shards, damaged="the header (byte 8) says")
        shards[1].unlink()
        self.check(*shards, damaged="cannot open")

    def test_sidecars_that_say_otherwise(self):
        path = self.made()[0]
        meta_path = path.with_suffix(".meta.json")
        meta = json.loads(meta_path.read_text())
        offsets = meta["document_offsets"]
        for change, part in (({"tokens": 5}, "tokens is"), ({"dtype": "uint32"}, "dtype is uint16"),
                             ({"checksum": {"value": "0"}}, "sha256 is"), ({"checksum": None}, "says None"),
                             ({"vocab_size": 256}, "id 256 is not below the vocabulary size 256"),
                             ({"documents": 1}, "documents, its .meta.json says 1"),
                             ({"document_offsets": offsets[1:]}, f"token {offsets[0]} starts a document that the"),
                             ({"document_offsets": offsets + [offsets[-1] + 1]},
                              f"token {offsets[-1] + 1} does not start a document"),
                             ({"document_offsets": offsets[::-1]}, "does not list the documents in their order"),
                             ({"document_offsets": offsets[:1] + offsets}, "in their order, each once")):
            meta_path.write_text(json.dumps({**meta, **change}))
            self.check(path, damaged=part)
        meta_path.write_text("{")
        self.check(path, damaged="not readable")

    def test_sidecars_of_other_types(self):
        path = self.made()[0]
        meta_path = path.with_suffix(".meta.json")
        meta = json.loads(meta_path.read_text())
        for name, value, kind in (("tokenizer", "gpt2", "an object"), ("checksum", "ab", "an object"),
                                  ("vocab_size", "9", "a number"), ("document_offsets", 3, "a list"),
                                  ("loss_mask", [1], "an object")):
            meta_path.write_text(json.dumps({**meta, name: value}))
            self.check(path, damaged=f"DAMAGED {meta_path}: {name} is {json.dumps(value)}, not {kind}\n")

    def test_a_sidecar_that_names_the_separator_only(self):
        path = self.made()[0]
        path.with_suffix(".meta.json").write_text('{"tokenizer": {"separator": 256}}')
        self.assertRegex(self.check(path), r" tokens, \d+ documents, ids to 256 \(its .meta.json has no counts and no ")
        path.with_suffix(".meta.json").write_text('{"tokenizer": {"separator": 256}, "tokens": 3}')
        self.check(path, damaged="tokens is ")

    def test_masks_and_sidecars_stand_for_their_shard(self):
        shards = self.made()
        mask = shards[0].with_suffix(".mask")
        count = (shards[0].stat().st_size - 1024) // 2
        mask.write_bytes(struct.pack("<8sQQQ", b"LOSSMASK", 1, count, 0) + bytes((count + 7) // 8))
        text = self.check(*sorted(self.out.iterdir()))   # as a shell expands out/*
        self.assertIn(f"{len(shards)} shards, 0 damaged", text)
        self.assertIn(", 0 count as targets, ids to 256\n", text)
        for name in (mask, shards[0].with_suffix(".meta.json")):
            self.assertIn("1 shard, 0 damaged", self.check(name))
        shards[0].unlink()
        self.check(mask, damaged=f"DAMAGED {mask}: belongs to a .bin file that is not there\n")

    def test_shards_that_do_not_go_together(self):
        shards = self.made()
        copy = self.file("copy.bin", shards[0].read_bytes())
        self.check(*shards, copy, damaged=f"{copy}: holds the same bytes as {shards[0]}")
        meta_path = shards[-1].with_suffix(".meta.json")
        meta = json.loads(meta_path.read_text())
        meta["tokenizer"]["sha256"] = "another"
        meta_path.write_text(json.dumps(meta))
        self.check(*shards, damaged=f"{shards[-1]}: made with another tokenizer than {shards[0]}")

    def test_options(self):
        for option in ("--vocab-size", "--workers"):
            self.assertEqual(self.script("check_shards.py", option, "-1", "a.bin", code=2),
                             f"error: {option} -1: must not be negative\n")
