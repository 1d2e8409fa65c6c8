// Which bytes of a checkpoint each rank reads and writes, and how much memory it needs for that.
#include <nlohmann/json.hpp>

#include "llmc/checkpoint/save_layout.h"
#include "tests/support/sharded_state.h"

using namespace checkpoint_test;

namespace {

// The bytes that the calling thread has read and written so far.
struct Io {
    int64_t read = 0, written = 0;

    static Io now() {
        std::ifstream file("/proc/thread-self/io");
        Io io;
        std::string name;
        for (int64_t value; file >> name >> value;) {
            if (name == "rchar:") io.read = value;
            if (name == "wchar:") io.written = value;
        }
        return io;
    }
    Io operator-(const Io& before) const { return {read - before.read, written - before.written}; }
};

// A model that is large compared with the headers of its files, and whose shard ranges begin within rows.
ModelConfig wide(ModelConfig c) {
    c.hidden_size = 200, c.ffn_hidden_size = 296, c.vocab_size = 1003;
    return c;
}

int64_t elems_of(const Held& held) {
    int64_t elems = 0;
    for (const std::vector<ElementRange>& parts : held)
        for (const ElementRange& part : parts) elems += part.count;
    return elems;
}

// The bytes of headers and config.json, and those of reading /proc/thread-self/io and of exchanging outcomes.
constexpr int64_t kSmall = 80000;

}  // namespace

TEST_CASE("checkpoint, ranges: every rank reads and writes only the bytes of its shards") {
    for (int ranks : {1, 2, 3, 4, 8}) {
        CAPTURE(ranks);
        TempDir dir;
        FakeState state(wide(llama_config()));
        state.randomise(1);
        int64_t total = 0;
        for (const Param& param : state.table.params) total += param.elems();
        REQUIRE(total * 12 / 8 > 10 * kSmall);
        CHECK(run_ranks(ranks, [&](LocalComm& comm) {
            FakeShards shard(state, comm);
            shard.take(state);
            const int64_t held = elems_of(shard.held);
            CHECK(held <= total / ranks + ranks * kParamAlign * static_cast<int64_t>(shard.table.params.size()));
            CheckpointSaver saver(request_of(dir.path, 1), shard.config, shard.table, shard.access(), comm);
            Io before = Io::now();
            saver.save(1, state_json(1));
            const Io saving = Io::now() - before;
            CHECK(saving.written >= held * 12);
            CHECK(saving.written <= held * 14 + kSmall);
            CHECK(saving.read <= kSmall);

            FakeShards back(state, comm);
            before = Io::now();
            load_checkpoint(dir / "step-00000001", back.config, back.table, back.access(), comm);
            const Io loading = Io::now() - before;
            CHECK(back.part_of(state));
            CHECK(loading.read >= held * 12);
            CHECK(loading.read <= held * 12 + kSmall);
        }) == nothing(ranks));
        check_weights(dir / "step-00000001", state);

        // Loaded as a model without its manifest: with it, the ranks of a host would together read every byte once
        // more.
        std::filesystem::remove(dir / "step-00000001/manifest.json");
        std::filesystem::remove(dir / "step-00000001/state.json");
        CHECK(run_ranks(ranks, [&](LocalComm& comm) {
            FakeShards back(state, comm);
            const Io before = Io::now();
            load_hf_weights(dir / "step-00000001", back.config, back.table, back.access(), comm);
            CHECK((Io::now() - before).read <= elems_of(back.held) * 2 + kSmall);
        }) == nothing(ranks));
    }
}

TEST_CASE("checkpoint, ranges: each rank reads whole rows of transposed tensors, and writes whole tensors") {
    TempDir dir;
    ModelConfig config = wide(gpt2_config());
    config.kv_channels = 40;
    FakeState state(config);
    state.randomise(2);
    const int64_t row_bytes = 4 * 296;
    for (int ranks : {1, 3, 8}) {
        CAPTURE(ranks);
        CheckpointRequest request = request_of(dir.path, ranks);
        request.staging_bytes = 20000;
        CHECK(run_ranks(ranks, [&](LocalComm& comm) {
            FakeShards shard(state, comm);
            shard.take(state);
            const int64_t held = elems_of(shard.held);
            CheckpointSaver saver(request, shard.config, shard.table, shard.access(), comm);
            CHECK(saver.buffer_bytes() <= 20000 + 32 * row_bytes + 128);
            const Io before = Io::now();
            saver.save(ranks, state_json(ranks));
            // The masters of all transposed tensors are read once by all ranks together.
            const Io saving = Io::now() - before;
            const int64_t read = static_cast<Comm&>(comm).sum(std::vector<int64_t>{saving.read})[0];
            int64_t transposed = 0;
            for (const HfTensor& tensor : hf_tensors(state.table, Dtype::kFp32))
                if (tensor.part.transposed) transposed += tensor.entry.bytes();
            CHECK(read >= transposed);
            CHECK(read <= transposed + ranks * kSmall);
            CHECK(saving.written <= held * 12 + 4 * transposed / ranks + kSmall);
        }) == nothing(ranks));
        const std::string path = dir.path + "/" + step_directory_name(ranks);
        check_weights(path, state);
        std::filesystem::remove(path + "/manifest.json");
        std::filesystem::remove(path + "/state.json");
        for (int readers : {1, 2, 5})
            CHECK(run_ranks(readers, [&](LocalComm& comm) {
                FakeShards back(state, comm), expected(state, comm);
                const Io before = Io::now();
                load_hf_weights(path, back.config, back.table, back.access(), comm, request.staging_bytes);
                CHECK((Io::now() - before).read
                      <= elems_of(back.held) * 2 + static_cast<int64_t>(back.table.params.size()) * row_bytes + kSmall);
                CHECK(back.largest_request_bytes <= load_staging_bytes(back.table, request.staging_bytes));
                // The loaded masters are the stored weights, which are rounded masters; padding is 0.
                for (size_t p = 0; p < back.held.size(); p++)
                    for (const ElementRange& part : back.held[p])
                        for (int64_t i = part.begin; i < part.begin + part.count; i++) {
                            const Param& param = back.table.params[p];
                            const float value = state.master(static_cast<int>(p), 0, i);
                            const bool padding = i >= hf_rows(param) * param.cols;
                            const float wanted = padding ? 0.0f : static_cast<float>(bf16(value));
                            const float found = back.master(static_cast<int>(p), 0, i);
                            if (bf16::to_bits(wanted) != bf16::to_bits(found)) FAIL_CHECK(param.name << " " << i);
                        }
            }) == nothing(readers));
    }
}

TEST_CASE("checkpoint, ranges: staging memory is bounded, and as large as predicted") {
    for (const NamedConfig& c : all_configs())
        for (int64_t staging : {int64_t{400}, int64_t{5000}, kStagingBytes})
            for (int ranks : {1, 3}) {
                CAPTURE(c.name, staging);
                FakeState state(c.config);
                HeldByRank held;
                int64_t columns = 1;
                for (const Param& param : state.table.params) columns = std::max({columns, param.cols, param.rows});
                for (int rank = 0; rank < ranks; rank++) held.push_back(held_by(state.table, rank, ranks, 3000, true));
                const SaveLayout layout = make_save_layout(state.table, {}, held);
                SaveOptions options;
                options.staging_bytes = staging;
                CHECK(load_staging_bytes(state.table, staging) <= std::max(staging, (columns + 32) * 4));
                for (int rank = 0; rank < ranks; rank++) {
                    const int64_t saving = save_buffer_bytes(layout, options, rank);
                    CHECK(saving >= staging);
                    // One block, and the 32 rows of the parameter that it needs.
                    CHECK(saving <= std::max(staging, columns * 2) + 32 * 4 * columns + 128);
                    options.async = true;
                    CHECK(save_buffer_bytes(layout, options, rank) >= layout.buffer_bytes(rank));
                    options.async = false;
                }
            }
}

TEST_CASE("checkpoint, ranges: stacked, interleaved and MXFP4 experts are read by ranks that hold parts of rows") {
    for (const std::string name : {"gpt_oss", "gpt_oss_mxfp4"}) {
        CAPTURE(name);
        const std::string path = "tests/fixtures/" + name;
        FakeState state(model_config_from_hf(path));
        load_hf_weights(path, state.config, state.table, state.access(), *open_single());
        for (int64_t staging : {int64_t{400}, int64_t{5000}})
            CHECK(run_ranks(5, [&](LocalComm& comm) {
                FakeShards back(state, comm);
                load_hf_weights(path, back.config, back.table, back.access(), comm, staging);
                for (size_t p = 0; p < back.held.size(); p++)
                    for (const ElementRange& part : back.held[p])
                        for (int64_t i = part.begin; i < part.begin + part.count; i++)
                            if (back.master(static_cast<int>(p), 0, i) != state.master(static_cast<int>(p), 0, i))
                                FAIL_CHECK(back.table.params[p].name << " " << i);
            }) == nothing(5));
    }
}

TEST_CASE("checkpoint, ranges: if one rank fails to load, all ranks have its error") {
    TempDir dir;
    FakeState state(one_layer());
    state.randomise(1);
    const std::string path = save(state, request_of(dir.path, 1));
    for (bool weights_only : {false, true}) {
        const Strings errors = run_ranks(3, [&](LocalComm& comm) {
            FakeShards shard(state, comm);
            StateAccess access = shard.access();
            if (comm.world().rank == 1)
                access.write = [](StateKind, int, int64_t, int64_t, const void*) {
                    throw Error(kExitPeerLost, "the device is gone");
                };
            if (weights_only) load_hf_weights(path, shard.config, shard.table, access, comm);
            else load_checkpoint(path, shard.config, shard.table, access, comm);
        });
        for (const std::string& error : errors)
            CHECK(error == "exit 6: " + path + " cannot be loaded, rank 1: the device is gone");
    }
    std::filesystem::remove(path + "/model.safetensors");   // an error that all ranks have names no rank
    const Strings errors = run_ranks(3, [&](LocalComm& comm) {
        FakeShards shard(state, comm);
        load_checkpoint(path, shard.config, shard.table, shard.access(), comm);
    });
    for (const std::string& error : errors)
        check_contains(error, {"exit 2: " + path + " has neither model.safetensors nor"});
}

TEST_CASE("checkpoint, ranges: a tied head that differs from the embedding is found, whichever rank compares it") {
    TempDir dir;
    ModelConfig config = one_layer();
    config.tied_head = true;
    config.hidden_size = 512;
    config.vocab_size = 3000;   // six blocks of 1 MiB of FP32
    FakeState state(config, {.weight = Dtype::kFp32});
    state.randomise(1);
    const std::string path = save(state, request_of(dir.path, 1)), file = path + "/model.safetensors";
    std::filesystem::remove(path + "/manifest.json");
    std::filesystem::remove(path + "/state.json");
    std::vector<SafetensorsEntry> entries = entries_of(hf_tensors(state.table, Dtype::kFp32));
    std::string data;
    {
        const HfModelFiles files(path);
        for (const SafetensorsEntry& entry : entries) data += content_of(*files.tensors().at(entry.name).view);
        data += content_of(*files.tensors().at(entries[0].name).view);
    }
    const int64_t head_bytes = entries[0].bytes();
    entries.push_back(entries[0]);
    entries.back().name = "lm_head.weight";
    auto load_on = [&](int ranks) {
        spill_tensors(file, entries, data);
        return run_ranks(ranks, [&](LocalComm& comm) {
            FakeShards shard(state, comm);
            load_hf_weights(path, shard.config, shard.table, shard.access(), comm);
        });
    };
    CHECK(load_on(3) == Strings(3, "nothing"));
    for (int64_t block = 0; block * (1 << 20) < head_bytes; block++) {
        CAPTURE(block);
        char& changed = data[data.size() - static_cast<size_t>(head_bytes) + static_cast<size_t>(block << 20)];
        changed = static_cast<char>(changed ^ 1);
        for (const std::string& error : load_on(block % 2 == 0 ? 3 : 1))
            check_contains(error, {"exit 2", "lm_head.weight differs from model.embed_tokens.weight"});
        changed = static_cast<char>(changed ^ 1);
    }
}
