// config.json: where the numbers of rope may stand, and that no field is passed over in silence.
#include "tests/support/hf_config_test.h"

using namespace checkpoint_test;

// As transformers 5 reads them: the base and the original positions stand inside or
// outside of rope_scaling, and a null is absent.
TEST_CASE("config.json: the base and the original positions of rope beside and in their dictionary") {
    Json plain = json_of("llama");
    for (const char* name : {"rope_parameters", "rope_theta", "rope_scaling"}) plain.erase(name);
    const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 16}};
    const auto base = [&](const Json& more, double theta, int64_t original = 0) {
        Json json = plain;
        json.update(more);
        CAPTURE(more.dump());
        const ModelConfig c = read_config(json);
        CHECK(c.rotary_base == theta);
        CHECK((c.rope_scaling.factor > 0 ? c.rope_scaling.original_max_positions : 0) == original);
    };
    const auto with_base = [&](Json scaling) {
        scaling["rope_theta"] = 1e6;
        return scaling;
    };
    base(Json::object(), 1e4);
    base({{"rope_theta", 1e6}}, 1e6);
    for (const char* name : {"rope_scaling", "rope_parameters"}) {
        base({{name, with_base({{"rope_type", "default"}})}}, 1e6);
        base({{name, with_base(yarn)}}, 1e6, 16);
        base({{name, with_base(yarn)}, {"rope_theta", nullptr}}, 1e6, 16);
        base({{name, with_base(yarn)}, {"rope_theta", 1e6}}, 1e6, 16);
        base({{name, {{"rope_type", "default"}}}, {"rope_theta", 1e6}}, 1e6);
        Json outside = yarn;
        outside.erase("original_max_position_embeddings");
        base({{name, outside}, {"original_max_position_embeddings", 16}}, 1e4, 16);
        base({{name, yarn}, {"original_max_position_embeddings", 16}}, 1e4, 16);
        plain[name] = with_base(yarn);
        check_contains(with(plain, "/rope_theta", 1e4), {"\"rope_theta\"", std::string(name) + " says otherwise"});
        check_contains(with(plain, "/original_max_position_embeddings", 64), {"says otherwise"});
        check_contains(with(plain, "/" + std::string(name) + "/type", "linear"), {"rope_type says otherwise"});
        plain.erase(name);
    }
    base({{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8.0}, {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0}}},
          {"original_max_position_embeddings", 16}}, 1e4, 16);
    plain["rope_scaling"] = with_base(yarn);
    check_contains(with(plain, "/rope_parameters", {{"rope_type", "yarn"}, {"factor", 4.0}, {"rope_theta", 2e6},
                                                    {"original_max_position_embeddings", 16}}),
                   {"contradicts rope_scaling"});
}

TEST_CASE("config.json: a field is read, known to change nothing, or refused") {
    for (const NamedConfig& c : all_configs()) {
        CAPTURE(c.name);
        const Json json = Json::parse(hf_config_json(c.config, Dtype::kFp32));
        check_contains(with(json, "/logit_scale", 2), {"DIR/config.json: \"logit_scale\" is 2", "not known"});
        CHECK(with(json, "/logit_scale", nullptr) == "nothing");
        for (const char* inert : {"attn_pdrop", "task_specific_params", "torch_dtype", "_name_or_path", "top_p"})
            CHECK(with(json, std::string("/") + inert, {{"any", 0.5}}) == "nothing");
        for (const char* off : {"is_decoder", "use_mrope", "rope_interleaved"}) {
            CHECK(with(json, std::string("/") + off, false) == "nothing");
            check_contains(with(json, std::string("/") + off, true), {off, "not supported"});
        }
        for (const char* inner : {"rope_scaling", "rope_parameters", "rope"})
            if (json.contains(inner) && json[inner].is_object())
                check_contains(with(json, "/" + std::string(inner) + "/other_factor", {1.5}),
                               {"config.json: " + std::string(inner) + ": \"other_factor\" is [1.5]", "not known"});
    }
    // What the scaling at hand does not use is refused, too.
    check_contains(with(json_of("qwen2, yarn"), "/rope_scaling/low_freq_factor", 1.0),
                   {"low_freq_factor", "not known"});
    CHECK(with(json_of("qwen2, yarn"), "/rope_scaling/finetuned", true) == "nothing");
    for (const char* name : {"qwen2", "qwen3", "mistral"})
        check_contains(with(json_of(name), "/mlp_bias", true), {"mlp_bias"});
    check_contains(with(json_of("mistral"), "/attention_bias", true), {"attention_bias"});
}

TEST_CASE("config.json: its dropout, which training here has not, is named") {
    const TempDir dir;
    const auto note = [&](const Json& json) {
        spill(dir / "config.json", json.dump());
        return dropout_note(dir.path);
    };
    CHECK(note(json_of("gpt2")).empty());
    CHECK(note({{"resid_pdrop", 0.1}, {"attn_pdrop", 0}, {"attention_dropout", 0.5}})
          == dir.path + "/config.json has resid_pdrop 0.1, attention_dropout 0.5: training here has no dropout");
}
