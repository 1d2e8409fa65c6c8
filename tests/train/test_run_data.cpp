// The tokenizer of the training data against the model's, --tokenizer, --resume and the vocabulary; padding of experts.
#include "llmc/train/run/run_data.h"

#include <algorithm>

#include "llmc/base/system/files.h"
#include "llmc/data/token_text.h"
#include "tests/support/data_test.h"

using namespace data_test;

namespace {

constexpr const char* kTokenizer = R"({"model": {"vocab": {"a": 0, "b": 1, "c": 2}}})";
constexpr const char* kOther = R"({"model": {"vocab": {"a": 0, "c": 1, "b": 2}}})";

struct Case {
    TempDir dir;
    Config config;
    std::vector<std::string> notes;

    Case() {
        spill(dir / "a.bin", llmc_v1(std::vector<uint32_t>(100, 1)));
        config.train_data = {dir / "a.bin"}, config.seq_length = 4;
        config.micro_batch_size = config.global_batch_size = config.train_iters = 1, config.shape.vocab_size = 300;
        file("model/tokenizer.json", kTokenizer);
        file("other/tokenizer.json", kOther);
    }
    std::string file(const char* name, const std::string& text) {
        make_directories((dir / name).substr(0, (dir / name).rfind('/')));
        spill(dir / name, text);
        return dir / name;
    }
    void sidecar(const char* name, const std::string& vocabulary, int64_t size) {
        file("a.meta.json", strf(R"({"vocab_size": %lld, "tokenizer": {"name": "%s", "vocabulary": "%s"}})", ll(size),
                                 name, vocabulary.c_str()));
    }
    std::string said() {
        notes.clear();
        return error_of([&] { RunData().open(config, notes); });
    }
};

}  // namespace

TEST_CASE("run data: the tokenizer of the shards is that of the model") {
    Case c;
    const std::string vocabulary = vocabulary_of(c.dir / "model/tokenizer.json");
    c.sidecar("mine.json", vocabulary, 3);
    const auto loads = [&](const char* name) { c.config.load = c.dir / name; };
    loads("model");
    CHECK(c.said() == "nothing");
    CHECK(c.notes.empty());
    loads("none");   // has no tokenizer
    CHECK(c.said() == "nothing");
    loads("other");
    check_contains(c.said(), {"exit 2", "other has another tokenizer than data shard '", "a.bin', which was made with "
                              "mine.json: make shards with data/prepare_text.py --tokenizer ", "name that with"});
    c.config.tokenizer = c.dir / "model";   // the model is to learn it
    CHECK(c.said() == "nothing");
    loads("model");
    for (const std::string& wrong : {c.dir / "other", c.dir / "other/tokenizer.json", std::string("bytes")}) {
        c.config.tokenizer = wrong;
        check_contains(c.said(), {"exit 2", "--tokenizer ", wrong, " has another tokenizer than data shard '"});
    }
    c.config.tokenizer.clear();
    c.sidecar("bytes", "", 257);
    check_contains(c.said(), {"exit 2", "model has another tokenizer", "made with bytes"});
    c.config.tokenizer = "bytes";
    CHECK(c.said() == "nothing");
    c.config.tokenizer.clear();
    std::filesystem::remove(c.dir / "a.meta.json");
    CHECK(c.said() == "nothing");
    REQUIRE(c.notes.size() == 1);
    check_contains(c.notes[0], {"the data's .meta.json does not name a vocabulary to compare with that of ", "model"});
}

TEST_CASE("run data: the tokenizer of the shards is that of the checkpoint, which knows it without a tokenizer.json") {
    Case c;
    c.file("run/step-00000002/state.json", R"({"step": 2, "train_data": {"shards": [], "vocabulary": "bytes"}})");
    c.file("run/step-00000003/state.json", "{");   // damaged: refused where it is loaded
    c.config.save = c.dir / "run";
    c.sidecar("mine.json", vocabulary_of(c.dir / "model/tokenizer.json"), 3);
    for (const char* from : {"run/step-00000002", "run/step-00000003"}) {
        c.config.resume = c.dir / from;
        check_contains(c.said(), {from == std::string("run/step-00000002") ? "exit 2" : "nothing"});
    }
    std::filesystem::remove_all(c.dir / "run/step-00000003");
    c.config.resume = "auto";
    check_contains(c.said(), {"exit 2", "run/step-00000002 has another tokenizer", "made with mine.json"});
    c.sidecar("bytes", "bytes", 257);
    CHECK(c.said() == "nothing");
    std::filesystem::remove_all(c.dir / "run");
    c.config.load = c.dir / "model";   // there is nothing to resume
    check_contains(c.said(), {"exit 2", "model has another tokenizer"});
}

TEST_CASE("run data: a vocabulary of initial weights has the tokenizer's tokens") {
    Case c;
    c.sidecar("bytes", "bytes", 257);
    c.config.shape.vocab_size = 256;
    check_contains(c.said(), {"exit 2", "--vocab-size 256: the tokenizer of the data, bytes, has more",
                              "--vocab-size 257"});
    for (int64_t vocab : {257, 320, 50257}) {
        c.config.shape.vocab_size = vocab;
        CHECK(c.said() == "nothing");
        CHECK(c.notes.size() == (vocab == 50257));
    }
    check_contains(c.notes[0], {"the tokenizer of the data, bytes, has 257 tokens, the model's vocabulary 50257"});
    c.config.load = c.dir / "model";   // added tokens that the model's file has may lie above its vocabulary
    c.config.shape.vocab_size = 2;
    c.sidecar("mine.json", vocabulary_of(c.dir / "model/tokenizer.json"), 3);
    CHECK(c.said() == "nothing");
}

TEST_CASE("run data: that padding goes to experts as tokens do is said") {
    Case c;
    c.file("a.meta.json", R"({"tokenizer": {"separator": 1}})");
    spill(c.dir / "a.bin", llmc_v1({1, 2, 3, 1, 4, 5, 1, 6, 7, 1}));   // documents of three tokens, samples of four
    const auto noted = [&] {
        CHECK(c.said() == "nothing");
        return std::count_if(c.notes.begin(), c.notes.end(), [](const std::string& note) {
            return note.starts_with("experts: the padding of samples");
        });
    };
    c.config.align_documents = true;
    CHECK(noted() == 0);
    c.config.shape.num_experts = 4;
    CHECK(noted() == 1);
    c.config.align_documents = false;
    CHECK(noted() == 0);
}
