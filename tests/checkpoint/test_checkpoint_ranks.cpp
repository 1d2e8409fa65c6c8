// Checkpoints that several ranks write together and any number of ranks read.
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>

#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/save_layout.h"
#include "tests/support/sharded_state.h"

using namespace checkpoint_test;
using Json = nlohmann::json;

namespace {

// Saves one rank's shards of `state`.
void save_part(FakeState& state, const CheckpointRequest& request, Comm& comm, bool zero = true) {
    FakeShards shard(state, comm, zero);
    shard.take(state);
    CheckpointSaver saver(request, shard.config, shard.table, shard.access(), comm);
    saver.save(request.step, request.state_json);
}

Strings save_on(int ranks, FakeState& state, const CheckpointRequest& request, bool zero = true) {
    return run_ranks(ranks, [&](LocalComm& comm) { save_part(state, request, comm, zero); });
}

// Loads on that many ranks, compares each rank's shards with `state`, and saves them again under `again`.
void check_load_on(int ranks, FakeState& state, const CheckpointRequest& request, const std::string& again, bool zero) {
    const Strings errors = run_ranks(ranks, [&](LocalComm& comm) {
        const FoundCheckpoint found = find_checkpoint("auto", request.root, comm);
        CHECK(found.path == request.root + "/" + step_directory_name(request.step));
        CHECK(found.state_json == request.state_json);
        FakeShards shard(state, comm, zero);
        load_checkpoint(found.path, shard.config, shard.table, shard.access(), comm, request.staging_bytes);
        CHECK(shard.part_of(state));
        const auto flip = [&] {   // biases of routers have no moments
            for (std::vector<char>& moments : shard.of(StateKind::kExpAvgSq))
                if (!moments.empty()) moments.back() ^= 1;
        };
        flip();   // the check can fail
        CHECK_FALSE(shard.part_of(state));
        flip();
        CheckpointRequest next = request;
        next.root = again;
        CheckpointSaver saver(next, shard.config, shard.table, shard.access(), comm);
        saver.save(next.step, found.state_json);
    });
    CHECK(errors == nothing(ranks));
}

}  // namespace

TEST_CASE("checkpoint, ranks: saving, loading on another number of ranks and saving again gives equal bytes") {
    int64_t cases = 0;
    for (const NamedConfig& c : all_configs())
        for (int writers : {1, 2, 3, 8}) {
            CAPTURE(c.name, writers);
            TempDir dir;
            const bool small = cases % 2 == 1, zero = cases % 5 != 4;
            const Dtype moments = std::vector{Dtype::kFp32, Dtype::kBf16, Dtype::kE4m3}[static_cast<size_t>(cases % 3)];
            FakeState state(c.config, {small ? Dtype::kFp32 : Dtype::kBf16, moments});
            state.randomise(static_cast<uint64_t>(cases++));
            CheckpointRequest request = request_of(dir / "first", 7);
            if (small) {
                request.max_part_bytes = 30000;
                request.staging_bytes = 1000;
            }
            CHECK(save_on(writers, state, request, zero) == nothing(writers));
            const std::string path = dir / "first/step-00000007";
            const auto expected = contents(path);
            // The files are those that one rank writes.
            CheckpointRequest alone = request;
            alone.root = dir / "alone";
            CHECK(contents(save(state, alone)) == expected);
            for (int readers : {1, 2, 3, 4, 8}) {
                if (readers == writers && writers != 2) continue;
                CAPTURE(readers);
                const std::string again = dir / ("again" + std::to_string(readers));
                check_load_on(readers, state, request, again, readers % 2 == 0 || zero);
                CHECK(contents(again + "/step-00000007") == expected);
            }
        }
}

TEST_CASE("checkpoint, ranks: each byte has one writer, the work is shared, and a rank's memory is as predicted") {
    FakeState state(gpt2_config());
    const ParamTable& table = state.table;
    for (bool zero : {true, false})
        for (int ranks : {1, 2, 3, 4, 8}) {
            CAPTURE(ranks, zero);
            HeldByRank held;
            for (int rank = 0; rank < ranks; rank++) held.push_back(held_by(table, rank, ranks, 3000, zero));
            const SaveLayout layout = make_save_layout(table, {}, held, 30000);
            std::vector<int64_t> bytes(static_cast<size_t>(ranks));
            int64_t total = 0;
            std::vector<int64_t> next(table.params.size());
            for (const SavedRange& range : layout.ranges) {
                int64_t& at = next[static_cast<size_t>(range.param)];
                CHECK(range.begin == at);
                at += range.count;
                bool holds = false;
                for (const ElementRange& part :
                     held[static_cast<size_t>(range.rank)][static_cast<size_t>(range.param)])
                    holds |= part.begin <= range.begin && range.begin + range.count <= part.begin + part.count;
                CHECK(holds);
                bytes[static_cast<size_t>(range.rank)] += range.count * 12;
            }
            for (size_t p = 0; p < table.params.size(); p++) CHECK(next[p] == table.params[p].elems());
            for (int rank = 0; rank < ranks; rank++) {   // the copy in memory with --save-async
                const int64_t needed = layout.buffer_bytes(rank);
                CHECK(needed >= bytes[static_cast<size_t>(rank)]);
                CHECK(needed <= bytes[static_cast<size_t>(rank)] + (int64_t{20} << 10));
            }
            for (const SavedRange& range : layout.ranges)
                if (range.weight.file >= 0) bytes[static_cast<size_t>(range.rank)] += range.count * 2;
            for (const TransposedTensor& saved : layout.transposed)
                bytes[static_cast<size_t>(saved.rank)] += saved.tensor.entry.bytes();
            for (int64_t b : bytes) total += b;
            // The largest part that cannot be divided: a parameter that several ranks hold, or the end of a bucket.
            const int64_t slack = 131 * 40 * 14 + ranks * kParamAlign * 12 * 30;
            for (int64_t b : bytes) CHECK(b <= total / ranks + slack);
        }
    HeldByRank hole = held_whole(table, 2);
    hole[0][3][0].count = hole[1][3][0].count = 5;
    check_contains(error_of([&] { make_save_layout(table, {}, hole); }),
                   {"exit 1", "no rank holds elements 5 to", table.params[3].name});
}

TEST_CASE("checkpoint, ranks: a flipped bit in the range of any rank is found and named by any number of ranks") {
    TempDir dir;
    FakeState first = random_state(1, gpt2_config()), second = random_state(2, gpt2_config());
    CHECK(save_on(3, first, request_of(dir.path, 1)) == nothing(3));
    CHECK(save_on(3, second, request_of(dir.path, 2)) == nothing(3));
    const std::string path = dir / "step-00000002";
    const Json files = Json::parse(slurp(path + "/manifest.json")).at("files");
    std::vector<int64_t> by_rank(3);
    uint64_t draws = 0;
    for (const auto& [name, file] : files.items()) {
        if (!file.contains("ranges")) continue;
        const std::string bytes = slurp(path + "/" + name);
        int64_t end = 0;
        for (const Json& range : file["ranges"]) {
            CHECK(range["begin"] == end);
            end += range["bytes"].get<int64_t>();
            const Philox4 random = philox(3, draws++);
            const int64_t at = range["begin"].get<int64_t>() + random.word[0] % range["bytes"].get<int64_t>();
            std::string damaged = bytes;
            damaged[static_cast<size_t>(at)] ^= static_cast<char>(1 << random.word[1] % 8);
            spill(path + "/" + name, damaged);
            by_rank[range["rank"].get<size_t>()]++;
            const int ranks = 1 + static_cast<int>(random.word[2] % 4);
            const Strings errors = run_ranks(ranks, [&](LocalComm& comm) {
                const FoundCheckpoint found = find_checkpoint("auto", dir.path, comm);
                CHECK(found.path == dir / "step-00000001");
                REQUIRE(found.skipped.size() == 1);
                check_contains(found.skipped[0], {path, name, "written by rank " + range["rank"].dump(),
                                                  range["begin"].dump() + " to " + std::to_string(end)});
                find_checkpoint(path, "", comm);
            });
            for (const std::string& error : errors) check_contains(error, {"exit 5", name, "written by rank"});
        }
        CHECK(end == file["bytes"]);
        spill(path + "/" + name, bytes);
    }
    for (int64_t ranges : by_rank) CHECK(ranges > 5);
    CHECK(checkpoint_damage(path, true).empty());
    // The shares of the work cover everything.
    const std::string v = path + "/optimizer/v.safetensors", bytes = slurp(v);
    spill(v, bytes.substr(0, bytes.size() - 1) + static_cast<char>(bytes.back() ^ 1));
    int found = 0;
    for (int part = 0; part < 3; part++) found += !checkpoint_damage(path, true, part, 3).empty();
    CHECK(found == 1);
}

TEST_CASE("checkpoint: a manifest whose ranges leave out a byte, or of an unknown version, is damaged") {
    TempDir dir;
    FakeState state = random_state(1);
    CHECK(save_on(2, state, request_of(dir.path, 1)) == nothing(2));
    const std::string path = dir / "step-00000001";
    const Json original = Json::parse(slurp(path + "/manifest.json"));
    auto damage = [&](Json changed) {
        changed.erase("xxh3");
        changed["xxh3"] = xxh3_of_text(changed.dump());
        spill(path + "/manifest.json", changed.dump(2) + "\n");
        return checkpoint_damage(path, true);
    };
    CHECK(damage(original).empty());
    Json hole = original, future = original;
    hole["files"]["optimizer/m.safetensors"]["ranges"].erase(1);
    check_contains(damage(hole), {"no hash for byte", "optimizer/m.safetensors"});
    future["version"] = 3;
    check_contains(damage(future), {"manifest.json: \"version\" is 3: a whole number from 2 to 2"});
}

TEST_CASE("checkpoint, ranks: if any call fails, all ranks end with exit 7 and its name, and the older one remains") {
    FakeState first = random_state(1), second = random_state(2);
    struct Case { int ranks, victim; int64_t step; };
    for (const Case& c : {Case{1, 0, 1}, Case{1, 0, 2}, Case{2, 0, 2}, Case{2, 1, 2}}) {
        CAPTURE(c.ranks, c.victim, c.step);
        TempDir dir;
        CHECK(save_on(c.ranks, first, request_of(dir.path, 1)) == nothing(c.ranks));
        const std::string what =
            c.ranks == 1 ? "" : "step-00000002 was not saved, rank " + std::to_string(c.victim) + ": ";
        int64_t failed = 0, published = 0;
        for (int64_t fail_at = 0;; fail_at++) {
            CAPTURE(fail_at);
            int64_t calls = 0;
            const Strings errors = run_ranks(c.ranks, [&](LocalComm& comm) {
                CheckpointRequest request = request_of(dir.path, c.step);
                request.keep = 1;
                if (comm.world().rank == c.victim)
                    request.io_hook = [&](const char*, const std::string&) { return calls++ == fail_at ? ENOSPC : 0; };
                save_part(second, request, comm);
            });
            if (errors == nothing(c.ranks)) {
                CHECK(calls <= fail_at);   // every call has failed once
                break;
            }
            for (const std::string& error : errors) {
                check_contains(error, {"exit 7: " + what + "cannot ", dir.path, "No space left on device"});
                CHECK(error == errors[0]);
            }
            const FoundCheckpoint found = find_checkpoint("auto", dir.path);
            CHECK(found.skipped.empty());
            const bool is_second = load(found.path, second).same_as(second);
            (is_second ? published : failed)++;
            if (!is_second) {
                CHECK(list_directory(dir.path) == Strings{"step-00000001"});
                CHECK(load(found.path, first).same_as(first));
            }
            remove_tree(dir / "step-00000002");
            CHECK(save_on(c.ranks, first, request_of(dir.path, 1)) == nothing(c.ranks));
        }
        CHECK(failed > (c.ranks == 1 ? 50 : 15));
        CHECK(published <= (c.victim == 0 ? 3 : 0));   // fsync of root after the rename, and the calls after it
    }
}

TEST_CASE("checkpoint, ranks: all ranks get the error of one rank's state, and nothing is left on the disk") {
    TempDir dir;
    FakeState state = random_state(1, gpt2_config());
    for (StateKind bad : {StateKind::kMaster, StateKind::kExpAvgSq}) {
        const Strings errors = run_ranks(3, [&](LocalComm& comm) {
            FakeShards shard(state, comm);
            shard.take(state);
            StateAccess access = shard.access();
            if (comm.world().rank == 1)
                access.read = [read = access.read, bad](StateKind kind, int index, int64_t begin, int64_t count,
                                                        void* host) {
                    if (kind == bad) throw Error(kExitPeerLost, "the device is gone");
                    read(kind, index, begin, count, host);
                };
            CheckpointSaver saver(request_of(dir.path, 1), shard.config, shard.table, access, comm);
            saver.save(1, "{}");
        });
        for (const std::string& error : errors)
            CHECK(error == "exit 6: step-00000001 was not saved, rank 1: the device is gone");
        CHECK(list_directory(dir.path).empty());
    }
}

TEST_CASE("checkpoint, ranks: storage that not all ranks share is refused") {
    TempDir dir;
    FakeState state = random_state(1);
    // Every rank has its own folder, as on hosts with separate disks: the same name, other files.
    auto apart = [&](int ranks, const std::function<void(LocalComm&)>& body) {
        return run_ranks(ranks, [&](LocalComm& comm) {
            const std::string own = dir / ("host" + std::to_string(comm.world().rank));
            make_directories(own);
            REQUIRE(unshare(CLONE_FS) == 0);
            REQUIRE(chdir(own.c_str()) == 0);
            body(comm);
        });
    };
    Strings errors = apart(3, [&](LocalComm& comm) { save_part(state, request_of("run", 1), comm); });
    for (const std::string& error : errors)
        check_contains(error, {"exit 2: --save run: rank 1 on ", "does not see there what rank 0 on ",
                               "storage that all ranks share"});
    CHECK(list_directory(dir / "host0/run").empty());
    CHECK(save_on(1, state, request_of(dir / "host0/run", 1)) == nothing(1));
    for (const std::string where : {"auto", "run/step-00000001"}) {
        errors = apart(2, [&](LocalComm& comm) { find_checkpoint(where, "run", comm); });
        for (const std::string& error : errors)
            CHECK(error == "exit 2: rank 1 does not see run/step-00000001 and rank 0 does: checkpoints must be on "
                           "storage that all ranks share");
    }
    spill(dir / "file", "x");
    for (const std::string& error : save_on(3, state, request_of(dir / "file/root", 2)))
        check_contains(error, {"exit 7: --save cannot be used, rank 0: cannot mkdir", "/file: File exists"});
}
