// The eos tokens that a model's directory defines.
#include "llmc/checkpoint/huggingface/model_extras.h"

#include "tests/support/checkpoint_test.h"

using namespace checkpoint_test;

TEST_CASE("eos_token_ids: generation_config.json before config.json, an id or a list") {
    TempDir dir;
    const std::string generation = dir / "generation_config.json", config = dir / "config.json";
    using Ids = std::vector<int32_t>;
    CHECK(eos_token_ids(dir.path) == Ids{});
    spill(config, R"({"model_type": "llama", "eos_token_id": 7})");
    CHECK(eos_token_ids(dir.path) == Ids{7});
    for (const char* silent : {"{}", R"({"eos_token_id": null})", R"({"eos_token_id": []})"}) {
        spill(generation, silent);
        CHECK(eos_token_ids(dir.path) == Ids{7});
    }
    spill(generation, R"({"eos_token_id": 0})");
    CHECK(eos_token_ids(dir.path) == Ids{0});
    spill(generation, R"({"eos_token_id": [128001, 128008, 128009, 128008]})");
    CHECK(eos_token_ids(dir.path) == Ids{128001, 128008, 128009});
    spill(generation, "{}");
    spill(config, R"({"eos_token_id": [1, 2]})");
    CHECK(eos_token_ids(dir.path) == Ids{1, 2});
    spill(config, R"({"eos_token_id": null})");
    CHECK(eos_token_ids(dir.path) == Ids{});
    for (const char* wrong : {"-1", "\"</s>\"", "1.5", "[3, null]", "2147483648", "{}"}) {
        CAPTURE(wrong);
        spill(generation, "{\"eos_token_id\": " + std::string(wrong) + "}");
        check_contains(error_of([&] { eos_token_ids(dir.path); }),
                       {"exit 2", "generation_config.json", "eos_token_id"});
    }
}
