// HellaSwag: the file format and its errors; the score, compared with the training loss and on any number of ranks;
// evaluation must not change the state of training.
#include "tests/support/data_test.h"
#include "tests/support/zero_test.h"

#include <algorithm>

#include "llmc/train/run/hellaswag_run.h"

namespace {

using data_test::TempDir;
using Ids = std::vector<int32_t>;

struct Question {
    Ids context;
    std::vector<Ids> completions;
    int64_t label;
};

template <typename Word>
data_test::FileBytes file_of(const std::vector<Question>& questions) {
    data_test::FileBytes body;
    size_t longest = 0;
    for (size_t i = 0; i < questions.size(); i++) {
        std::vector<size_t> words = {std::numeric_limits<Word>::max(), 0, i, static_cast<size_t>(questions[i].label),
                                     questions[i].completions.size()};
        auto add = [&](const Ids& ids) {
            words.push_back(ids.size());
            words.insert(words.end(), ids.begin(), ids.end());
        };
        add(questions[i].context);
        for (const Ids& completion : questions[i].completions) add(completion);
        words[1] = words.size() * sizeof(Word);
        longest = std::max(longest, words[1]);
        for (size_t word : words) data_test::append(body, static_cast<Word>(word));
    }
    data_test::FileBytes bytes;
    for (size_t word : {size_t{20240522}, sizeof(Word) / 2, questions.size(), longest})
        data_test::append(bytes, static_cast<uint32_t>(word));
    bytes.resize(1024);
    return bytes + body;
}

// Rows of up to `most` inputs, the first of exactly so many; numbers of completions from 2 to 5.
std::vector<Question> questions(size_t count, size_t most, int64_t vocab) {
    std::vector<Question> all;
    for (size_t i = 0; i < count; i++) {
        auto draw = [&](uint64_t k, uint64_t n) { return static_cast<size_t>(philox(11, i, k).word[0] % n); };
        auto text = [&](uint64_t k, size_t n) {
            Ids ids;
            for (size_t j = 0; j < n; j++)
                ids.push_back(static_cast<int32_t>(philox(12 + k, i, j).word[0] % static_cast<uint64_t>(vocab)));
            return ids;
        };
        Question q{text(0, 1 + draw(1, most / 2)), {}, 0};
        for (size_t c = 0; c < 2 + draw(2, 4); c++) q.completions.push_back(text(c + 1, 1 + draw(c + 3, most / 2)));
        if (i == 0) q.completions.back() = text(9, most + 1 - q.context.size());
        q.label = static_cast<int64_t>(draw(20, q.completions.size()));
        all.push_back(q);
    }
    return all;
}

Hellaswag open_file(const TempDir& dir, const data_test::FileBytes& bytes, int64_t vocab = 29, int64_t T = 40) {
    std::ofstream(dir / "h.bin", std::ios::binary) << bytes;
    return Hellaswag(dir / "h.bin", vocab, T);
}

std::string refusal(const TempDir& dir, const data_test::FileBytes& bytes, int64_t T = 40) {
    return refusal_of([&] { open_file(dir, bytes, 29, T); });
}

// Labels for which every example is correct.
void label_lowest(std::vector<Question>& all, const std::vector<double>& losses) {
    auto row = losses.begin();
    for (Question& q : all) {
        const auto end = row + static_cast<int64_t>(q.completions.size());
        q.label = std::min_element(row, end) - row;
        row = end;
    }
}

Config scored_config(Fp8Recipe recipe, int64_t B = 2, int64_t T = 40) {
    Config config = fp8_config(fp8_shapes()[1], recipe);
    config.micro_batch_size = config.global_batch_size = B, config.seq_length = T;
    config.shape.max_positions = std::max<int64_t>(T, config.shape.max_positions);
    return config;
}

}  // namespace

TEST_CASE("hellaswag: rows of both versions of the file") {
    const TempDir dir;
    const std::vector<Question> all = questions(7, 40, 29);
    for (const data_test::FileBytes& bytes : {file_of<uint16_t>(all), file_of<uint32_t>(all)}) {
        const Hellaswag file = open_file(dir, bytes);
        CHECK(file.examples() == 7);
        CHECK(file.longest() == 40);
        int64_t row = 0;
        for (const Question& q : all)
            for (const Ids& completion : q.completions) {
                Ids inputs(41, 99), targets(41, 99), text = q.context;
                text.insert(text.end(), completion.begin(), completion.end());
                CHECK(file.read(row++, 41, inputs.data(), targets.data()) == static_cast<int64_t>(completion.size()));
                for (size_t t = 0; t < 41; t++) {
                    CHECK(inputs[t] == text[t % (text.size() - 1)]);
                    const bool counts = t + 1 >= q.context.size() && t + 1 < text.size();
                    CHECK(targets[t] == (counts ? text[t + 1] : kIgnoreIndex));
                }
            }
        CHECK(row == file.rows());
    }
    CHECK(open_file(dir, file_of<uint16_t>(all)).fingerprint() != open_file(dir, file_of<uint32_t>(all)).fingerprint());
}

TEST_CASE("hellaswag: the lowest loss wins, the first of equal ones, and never one that is not finite") {
    const TempDir dir;
    const Question q{{1}, {{2}, {3}, {4}}, 1};
    const Hellaswag file = open_file(dir, file_of<uint16_t>({q, q}));
    const double nan = std::nan("");
    CHECK(file.correct({3, 1, 2, 3, 2, 1}) == 1);
    CHECK(file.correct({1, 1, 2, 3, 1, 1}) == 1);
    CHECK(file.correct({nan, 1, 2, nan, nan, nan}) == 1);
}

TEST_CASE("hellaswag: errors of a file name byte and value") {
    const TempDir dir;
    const Question q{{1, 2}, {{3}, {4, 5}}, 1};   // words: ffff 24 i 1 2 | 2 1 2 | 1 3 | 2 4 5
    const data_test::FileBytes sound = file_of<uint16_t>({q, q});
    CHECK(refusal(dir, sound) == "");
    const int64_t second = 1024 + 26;
    struct Case {
        int64_t byte, value;
        const char* said;
    };
    const Case cases[] = {{0, 1, "byte 0: wrong magic"}, {0, 20240520, "a token shard"}, {4, 3, "byte 4: version 3"},
                          {8, 0, "byte 8: 0 examples"}, {8, 3, "byte 1076: the file ends where the start"},
                          {8, 1, "byte 1050: the header says 1 examples, and more follows"},
                          {12, 20, "byte 1026: the example's bytes is 26, must be in 1..20"}};
    for (const Case& c : cases) {
        data_test::FileBytes bytes = sound;
        const auto value = static_cast<uint32_t>(c.value);
        std::memcpy(bytes.data() + c.byte, &value, 4);
        CHECK_MESSAGE(refusal(dir, bytes).find(c.said) != std::string::npos, refusal(dir, bytes));
    }
    const Case words[] = {{0, 5, "byte 1050: the start of an example is 5, must be 65535"},
                          {2, 24, "example 1 ends here, by its size of 24 bytes at 1074"},
                          {4, 0, "byte 1054: the example's number is 0, must be 1"},
                          {6, 2, "byte 1056: label 2 of 2 completions"},
                          {8, 1, "byte 1058: the number of completions is 1, must be in 2..64"},
                          {10, 0, "byte 1060: the context's length is 0"}, {14, 29, "byte 1064: a token is 29"},
                          {16, 0, "byte 1066: the completion's length is 0"},
                          {20, 3, "byte 1076: the file ends where a token should be"}};
    for (const Case& c : words) {
        data_test::FileBytes bytes = sound;
        const auto value = static_cast<uint16_t>(c.value);
        std::memcpy(bytes.data() + second + c.byte, &value, 2);
        CHECK_MESSAGE(refusal(dir, bytes).find(c.said) != std::string::npos, refusal(dir, bytes));
    }
    for (int64_t n : {0, 3, 1023, 1025, 1075})
        CHECK(refusal(dir, sound.substr(0, static_cast<size_t>(n))).find("h.bin") != std::string::npos);
    CHECK(refusal(dir, sound, 2).find("example 0 has a context of 2 tokens and a completion of 2, which do not fit "
                                      "into --seq-length 2") != std::string::npos);
    CHECK(refusal(dir, sound, 3) == "");
}

TEST_CASE("hellaswag: the loss of a row equals the training loss, and one changed token changes the score") {
    const TempDir dir;
    // One shape per case: a pass has as many rows as a micro-batch, more rows, or fewer.
    for (const auto& [B, T] : {std::pair<int64_t, int64_t>{2, 40}, {3, 140}, {1, 300}}) {
        CAPTURE(T);
        Config config = tiny_config(tiny_llama(), Dtype::kFp32, B, T);
        config.shape.init_std = 0.3;
        TestModel model(config);
        model.set_random_batch(B, 1);
        std::vector<Question> all = questions(9, 40, 29);
        auto score = [&](std::vector<double>* losses) {
            const Hellaswag file = open_file(dir, file_of<uint16_t>(all), 29, T);
            HellaswagRun run(file, config, model.comm);
            const int64_t before = device::allocation_count();
            const auto result = run.evaluate(model.ctx, model.trainer->evaluator(), model.staged);
            CHECK(device::allocation_count() == before);
            REQUIRE(result);
            *losses = *result;
            return file.correct(*losses);
        };
        std::vector<double> losses, again;
        score(&losses);
        label_lowest(all, losses);
        CHECK(score(&again) == 9);
        CHECK(again == losses);
        all[4].label = (all[4].label + 1) % static_cast<int64_t>(all[4].completions.size());
        CHECK(score(&again) == 8);
        all[4].label = (all[4].label + static_cast<int64_t>(all[4].completions.size()) - 1)
                       % static_cast<int64_t>(all[4].completions.size());
        CHECK(score(&again) == 9);

        const Hellaswag file = open_file(dir, file_of<uint16_t>(all), 29, T);
        Config alone = config;
        alone.micro_batch_size = alone.global_batch_size = 1;
        TestModel reference(alone);
        for (int64_t row = 0; row < file.rows(); row++) {
            Ids inputs(static_cast<size_t>(T)), targets(static_cast<size_t>(T));
            file.read(row, T, inputs.data(), targets.data());
            reference.set_batch(inputs, targets);
            reference.gradients();
            CHECK(losses[static_cast<size_t>(row)] == doctest::Approx(reference.loss()).epsilon(1e-6));
        }

        // Another last token of one completion, the one place that is a target only: its row alone changes.
        int32_t& last = all[2].completions[1].back();
        last = last == 28 ? 0 : last + 1;
        score(&again);
        size_t changed_row = 1;
        for (size_t i = 0; i < 2; i++) changed_row += all[i].completions.size();
        for (size_t row = 0; row < losses.size(); row++) CHECK((again[row] == losses[row]) == (row != changed_row));
    }
}

TEST_CASE("hellaswag: results are bitwise equal for any number of ranks, in every recipe") {
    const TempDir dir;
    const std::vector<Question> all = questions(13, 40, 29);
    const Hellaswag file = open_file(dir, file_of<uint16_t>(all));
    std::map<Fp8Recipe, std::vector<double>> scores;
    for (Fp8Recipe recipe : kRecipes) {
        CAPTURE(static_cast<int>(recipe));
        std::vector<double>& expected = scores[recipe];
        for (int ranks : {1, 3}) {
            LocalRanks threads(ranks);
            std::mutex mutex;
            threads.run([&](Comm& comm) {
                Config config = scored_config(recipe);
                config.global_batch_size = 6;
                TestModel model(config, true, &comm);
                model.set_random_batch(6, 1);
                HellaswagRun run(file, model.config, comm);
                const auto losses = run.evaluate(model.ctx, model.trainer->evaluator(), model.staged);
                const std::lock_guard lock(mutex);
                if (expected.empty()) expected = losses.value();
                CHECK(losses == expected);
            });
        }
    }
    // Before the first step there is no history: delayed scaling uses current scales.
    CHECK(scores[Fp8Recipe::kDelayed] == scores[Fp8Recipe::kTensorwise]);
    CHECK(scores[Fp8Recipe::kNone] != scores[Fp8Recipe::kTensorwise]);
    CHECK(scores[Fp8Recipe::kBlockwise] != scores[Fp8Recipe::kTensorwise]);
    CHECK(scores[Fp8Recipe::kInt8Forward] != scores[Fp8Recipe::kTensorwise]);
}

TEST_CASE("hellaswag: evaluation does not change training, in every recipe") {
    const TempDir dir;
    const Hellaswag file = open_file(dir, file_of<uint16_t>(questions(5, 40, 29)));
    for (Fp8Recipe recipe : kRecipes)
        for (int ranks : {1, 3}) {
            CAPTURE(static_cast<int>(recipe));
            const auto between = [&](TestModel& model, int) {
                HellaswagRun run(file, model.config, model.comm);
                run.evaluate(model.ctx, model.trainer->evaluator(), model.staged);
                // The batch was read into the same memory.
                if (model.comm.root())
                    model.trainer->evaluator().generate(model.ctx, {1, 2}, {.tokens = 2, .temperature = 1, .top_k = 3},
                                                        1, model.staged);
            };
            const Config config = scored_config(recipe);
            CHECK(train(config, ranks) == train(config, ranks, 3, {.before_step = {}, .after_step = between}));
        }
}
