// Options of runs on several ranks: Megatron's spellings, options without effect, in general and on one rank, and what
// ranks cannot share.
#include "llmc/perf/fp8_speedup.h"
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

TEST_CASE("rank options: what ranks cannot share, and what experts and switches of precision need, is refused") {
    struct Case {
        int ranks;
        Words words;
        std::string text;
    };
    const Words small = {"--model", "llama-tiny", "--num-attention-heads", "4", "--num-query-groups", "2",
                         "--kv-channels", "8", "--seq-length", "16", "--micro-batch-size", "1",
                         "--global-batch-size", "12"};
    const Words experts = joined(small, {"--num-experts", "4"}), fp8 = joined(small, {"--fp8-recipe", "delayed"});
    const std::vector<Case> cases = {
        {2, {"--context-parallel", "4"}, "--context-parallel 4 must divide the number of ranks, 2"},
        {3, {"--context-parallel", "3"}, "--context-parallel 3 must divide --num-attention-heads 4"},
        {2, {"--context-parallel", "2", "--seq-length", "15"}, "--context-parallel 2 must divide --seq-length 15"},
        {6, {"--context-parallel", "6", "--num-attention-heads", "12", "--num-query-groups", "4"},
         "--context-parallel 6 must divide --num-query-groups 4, or be a multiple of it"},
        {2, {"--context-parallel", "2", "--fp8-recipe", "delayed"},
         "tokens 1 x 8 = 8 (--micro-batch-size x --seq-length / --context-parallel)"},
        {2, {"--context-parallel", "2", "--fp8-recipe", "blockwise", "--micro-batch-size", "2"},
         "parts of 8 tokens (--seq-length 16) are no multiple of 128, the tokens of a block"},
        {4, {"--context-parallel", "2", "--global-batch-size", "3"},
         "must be a multiple of --micro-batch-size 1 x 2 (4 ranks / --context-parallel 2)"},
        {3, joined(experts, {"--expert-parallel", "3"}), "--expert-parallel 3 must be 2, 4 or 8 and divide --num-e"},
        {2, joined(experts, {"--expert-parallel", "4"}), "--expert-parallel 4 must divide the number of ranks, 2"},
        {4, joined(experts, {"--expert-parallel", "4", "--zero-group", "2"}),
         "--expert-parallel 4 must divide --zero-group 2"},
        {2, joined(experts, {"--expert-parallel", "2", "--moe-capacity", "0.5"}), "--moe-capacity 0.5 is below 1"},
        {2, joined(experts, {"--expert-parallel", "2", "--optimizer", "muon", "--muon-beta2", "0.9"}),
         "leave out --zero-group"},
        {2, joined(experts, {"--expert-parallel", "2", "--micro-batch-size", "65536", "--global-batch-size", "131072",
                             "--seq-length", "16384"}), "have more than 2147483647 rows: lower --micro-batch-size"},
        {1, joined(experts, {"--fp8-recipe", "delayed"}), "--num-experts with FP8 needs --fp8-recipe blockwise"},
        {1, joined(experts, {"--fp8-recipe", "blockwise", "--fp8-format", "hybrid"}), "and its --fp8-format e4m3"},
        // (2^14 - 2) blocks of 128 rows, less one.
        {2, joined(experts, {"--fp8-recipe", "blockwise", "--expert-parallel", "2", "--seq-length", "65536",
                             "--max-position-embeddings", "65536", "--micro-batch-size", "8", "--global-batch-size",
                             "16"}),
         "at most 2096895 rows of the experts of a rank, and with --expert-parallel 2 --micro-batch-size 8 x 65536 "
         "tokens have up to 2097152: lower --micro-batch-size or --moe-capacity"},
        {1, joined(experts, {"--fp8-recipe", "blockwise", "--hidden-size", "65536", "--ffn-hidden-size", "65536"}),
         "131072 x 65536 in 0.up, have 524288 tiles of 256 x 256, and fewer than 262144 are supported"},
        {1, joined(experts, {"--moe-router-topk", "5"}), "--moe-router-topk 5 exceeds --num-experts 4"},
        {1, joined(experts, {"--activation", "relu2"}), "transformers has no other class"},
        {1, {"--fp8-final-bf16", "1"}, "--fp8-final-bf16 has no effect: FP8 is off"},
        {1, joined(fp8, {"--fp8-final-bf16", "1.5"}),
         "--fp8-final-bf16 1.5 must be a whole number of steps, or a fraction of the run below 1"},
        {1, joined(fp8, {"--fp8-first-bf16", "0.5", "--fp8-final-bf16", "50"}),
         "--fp8-first-bf16 0.5 and --fp8-final-bf16 50 leave no step of --train-iters 100 in FP8"},
    };
    for (const Case& c : cases) {
        const std::string text = refusal_of([&] {
            const Config config = parse("llama", last_words({base(""), small, c.words}), {.ranks = c.ranks}).config;
            fp8_plan_of(config, make_param_table(config.shape));
        });
        CAPTURE(text);
        CHECK_MESSAGE(contains(text, c.text), c.text);
    }
}
