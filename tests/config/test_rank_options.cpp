// Options of runs on several ranks: Megatron's spellings, and options without effect, in general and on one rank.
#include "tests/support/config_test.h"

namespace {

Config parsed(const Words& words) { return parse("gpt2", joined(base(""), words)).config; }

}  // namespace

TEST_CASE("rank options: by default gradients are communicated in their own dtype") {
    CHECK(parsed({}).grad_comm_dtype == Dtype::kFp32);
    CHECK(parsed({"--grad-dtype", "bf16"}).grad_comm_dtype == Dtype::kBf16);
    CHECK(parsed({"--grad-dtype", "bf16", "--grad-comm-dtype", "fp8"}).grad_comm_dtype == Dtype::kE4m3);
    CHECK(parsed({"--grad-comm-dtype", "bf16"}).grad_comm_dtype == Dtype::kBf16);
    const ParsedConfig finer = parse("gpt2", joined(base(""), {"--grad-dtype", "bf16", "--grad-comm-dtype", "fp32"}));
    REQUIRE(finer.notes.size() == 1);
    CHECK(contains(finer.notes[0], "are sent as bf16, since fp32 would not make them more precise"));
    CHECK(contains(config_to_json(parsed({"--grad-dtype", "bf16"})), "\"grad-comm-dtype\": \"bf16\""));
}

TEST_CASE("rank options: Megatron's flags are accepted with a note, on the command line and in files") {
    const ParsedConfig p = parse("gpt2", joined(base(""), {"--overlap-param-gather"}));
    CHECK(p.config.overlap);
    CHECK(p.notes == Words{"--overlap-param-gather is --overlap on"});
    CHECK(!parsed({"--overlap-grad-reduce=false"}).overlap);
    CHECK(parsed({"--use-distributed-optimizer=off"}).zero == 0);
    CHECK(parsed({"--use-distributed-optimizer"}).zero == 1);
    const TempFile file("{\"use_distributed_optimizer\": false, \"overlap-grad-reduce\": false}");
    const Config c = parsed({"--config", file.path});
    CHECK(c.zero == 0);
    CHECK(!c.overlap);
    CHECK(parsed({"--config", file.path, "--overlap_param_gather"}).overlap);   // the command line wins
    for (const Words& words : {Words{"--overlap", "off", "--overlap_param_gather"},
                               Words{"--overlap_param_gather", "--overlap=off"}})
        CHECK_EQ(refusal("gpt2", joined(base(""), words)), "--overlap_param_gather is --overlap on, and --overlap says "
                 "off: leave one of the two out");

    CHECK(contains(refusal("gpt2", joined(base(""), {"--overlap-param-gather=3"})), "must be true or false"));
    const TempFile number("{\"overlap_param_gather\": 1}");
    CHECK(contains(refusal("gpt2", joined(base(""), {"--config", number.path})), "must be true or false"));
    CHECK(contains(refusal("gpt2", {"--overlap-param-gathr"}), "did you mean --overlap-param-gather?"));
    // What always happens here is accepted, and cannot be switched off.
    const std::string always = "--fp8-param-gather: weights of FP8 linear layers are always all-gathered as FP8 bytes";
    CHECK(parse("gpt2", joined(base(""), {"--fp8-param-gather"})).notes == Words{always});
    const TempFile gather("{\"fp8_param_gather\": true}"), none("{\"fp8_param_gather\": false}");
    CHECK(contains(parse("gpt2", joined(base(""), {"--config", gather.path})).notes.at(0), "are always all-gathered"));
    for (const Words& words : {Words{"--fp8-param-gather=false"}, Words{"--config", none.path}})
        CHECK(contains(refusal("gpt2", joined(base(""), words)), "false: weights of FP8 linear layers are always"));
    CHECK(contains(refusal("gpt2", {"--fp8-param-gather=3"}), "must be true or false"));
    for (const Spelling& spelling : spellings()) {
        if (!spelling.option) continue;   // always on
        const OptionRow* row = find_option(spelling.option);
        REQUIRE(row);
        CHECK(!find_option(spelling.name));
        Config config;
        CHECK(row->value.set(config, row->value.parse(spelling.when_true)));
        CHECK(row->value.set(config, row->value.parse(spelling.when_false)));
    }
}

TEST_CASE("rank options: options without effect are refused") {
    auto refused = [](const Words& words, const std::string& part) {
        const std::string text = refusal("gpt2", joined(base(""), words));
        CAPTURE(text);
        CHECK(contains(text, "has no effect: "));
        CHECK(contains(text, part));
    };
    refused({"--fp8-stats-interval", "1"}, "FP8 is off");
    CHECK(parsed({"--fp8-stats-interval", "1", "--grad-comm-dtype", "fp8"}).fp8_stats_interval == 1);
    refused({"--zero-group", "2", "--zero", "0"}, "--zero 0 shards nothing");
    for (const char* level : {"0", "1"})
        refused({"--grad-shard-dtype", "bf16", "--zero", level}, "only --zero 2 and 3 shard gradients");
    CHECK(parsed({"--zero", "3", "--grad-shard-dtype", "bf16"}).grad_shard_dtype == Dtype::kBf16);
    CHECK(parsed({"--zero", "2"}).zero == 2);
    CHECK(parsed({"--zero", "3"}).zero == 3);
    CHECK(contains(refusal("gpt2", joined(base(""), {"--zero", "4"})), "--zero 4: must be an integer in [0, 3]"));
    CHECK(contains(refusal("gpt2", joined(base(""), {"--bucket-mb", "-1"})), "--bucket-mb -1: must be a number in [0"));
}

TEST_CASE("rank options: with one rank they have no effect, and a note names those that were set") {
    const Words words = joined(base(""), {"--overlap", "off", "--bucket-mb", "25", "--grad-comm-dtype", "fp8"});
    const ParsedConfig one = parse("gpt2", words);
    CHECK(one.no_effect == Words{"--bucket-mb has no effect with one rank", "--overlap has no effect with one rank",
                            "--grad-comm-dtype has no effect with one rank"});
    CHECK(parse("gpt2", words, {.ranks = 2}).no_effect.empty());
    CHECK(parse("gpt2", base("")).no_effect.empty());
}

TEST_CASE("rank options: groups of --zero-group divide the ranks") {
    const Config groups = parsed({"--zero-group", "4", "--micro-batch-size", "1", "--global-batch-size", "96"});
    auto broken = [&](int ranks) {
        std::string all;
        for (const std::string& error : config_errors(groups, ranks)) all += error + "\n";
        return all;
    };
    for (int ranks : {1, 4, 8, 12}) CHECK_EQ(broken(ranks), "");
    for (int ranks : {2, 6})
        CHECK_EQ(broken(ranks), strf("--zero-group 4 does not divide the %d ranks: each of its groups holds all "
                                     "shards\n", ranks));
    CHECK(contains(refusal("gpt2", joined(base(""), {"--zero-group", "1"})), "--zero-group 1 shards nothing"));
}
