// Asynchronous checkpoints, which a thread writes while training continues, their buffer in host memory, and kills
// while checkpoints of either kind are written.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/write_buffer.h"
#include "tests/support/sharded_state.h"

using namespace checkpoint_test;

namespace {

CheckpointRequest async_request(const std::string& root) {
    CheckpointRequest request = request_of(root, 0);
    request.async = true;
    return request;
}

// Holds up every disk call of the hook until the test opens it.
struct Gate {
    std::atomic<bool> open{false};
    IoHook hook() {
        return [this](const char* call, const std::string&) {
            while (!open && std::string(call) == "write") usleep(100);
            return 0;
        };
    }
};

// The training of one rank: its shard and its saver.
struct AsyncSave {
    FakeShards shard;
    std::vector<SavedCheckpoint> saved;
    CheckpointSaver saver;   // last member: its destructor waits for a running save and reports it

    AsyncSave(FakeState& state, Comm& comm, const CheckpointRequest& request)
        : shard(state, comm), saver(request, shard.config, shard.table, shard.access(), comm) {
        saver.on_saved([this](const SavedCheckpoint& s) { saved.push_back(s); });
    }
    void save(FakeState& state, int64_t step) {
        shard.take(state);
        saver.save(step, state_json(step));
    }
    int64_t polls_until_saved(size_t count) {
        int64_t polls = 0;
        for (; saved.size() < count; polls++) {
            usleep(200);
            saver.poll();
        }
        return polls;
    }
};

void check_saved(const std::string& root, int64_t step, FakeState& state) {
    const std::string path = root + "/" + step_directory_name(step);
    CHECK(checkpoint_damage(path, true).empty());
    CHECK(load(path, state).same_as(state));
}

}  // namespace

TEST_CASE("checkpoint, async: the saved state is that at the call, whatever training does afterwards") {
    for (int ranks : {1, 2, 3}) {
        CAPTURE(ranks);
        TempDir dir;
        std::vector<FakeState> states;
        for (uint64_t seed = 0; seed < 4; seed++) states.push_back(random_state(seed));
        Gate gate;
        const Strings errors = run_ranks(ranks, [&](LocalComm& comm) {
            CheckpointRequest request = async_request(dir.path);
            if (comm.root()) request.io_hook = gate.hook();
            AsyncSave run(states[0], comm, request);
            comm.gather("");   // all ranks have allocated their memory
            const int64_t allocations = device::allocation_count();
            run.save(states[0], 1);
            run.shard.take(states[1]);   // the next step changes the state before anything is written to the disk
            for (int i = 0; i < 5; i++) run.saver.poll();
            CHECK(run.saved.empty());
            CHECK(checkpoint_steps(dir.path).empty());
            comm.gather("");
            gate.open = true;
            // Preparing, writing and renaming are three stages; each of them ends in another step.
            CHECK(run.polls_until_saved(1) >= 3);
            CHECK(run.saved[0].step == 1);
            CHECK(run.saved[0].path == dir / "step-00000001");
            CHECK(run.saved[0].stall_seconds <= run.saved[0].seconds);
            // A second save while one is running waits for it; the end of the run waits for the last.
            run.save(states[2], 2);
            run.save(states[3], 3);
            CHECK(run.saved.size() == 2);
            run.saver.finish();
            CHECK(run.saved.size() == 3);
            run.saver.poll();
            run.saver.finish();
            CHECK(run.saved.size() == 3);
            CHECK(device::allocation_count() == allocations);
        });
        CHECK(errors == nothing(ranks));
        check_saved(dir.path, 1, states[0]);
        check_saved(dir.path, 2, states[2]);
        check_saved(dir.path, 3, states[3]);
        CHECK(list_directory(dir.path).size() == 3);
    }
}

TEST_CASE("checkpoint, async: the files are equal to those of a synchronous save") {
    FakeState state(gpt2_config(), {Dtype::kBf16, Dtype::kBf16});   // transposed matrices
    state.randomise(5);
    TempDir dir;
    for (bool async : {false, true}) {
        CheckpointRequest request = request_of(dir / (async ? "async" : "sync"), 4);
        request.async = async, request.staging_bytes = async ? 1 << 20 : 999, request.max_part_bytes = 40000;
        CHECK(run_ranks(3, [&](LocalComm& comm) {
            AsyncSave run(state, comm, request);
            run.save(state, 4);
            run.saver.finish();
        }) == Strings(3, "nothing"));
    }
    const Strings files = files_under(dir / "sync");
    CHECK(files.size() > 8);
    CHECK(files == files_under(dir / "async"));
    for (const std::string& file : files)   // the manifest lists other ranges, if the buffer was full in between
        if (!file.ends_with("manifest.json")) CHECK(slurp(dir / "sync/" + file) == slurp(dir / "async/" + file));
}

TEST_CASE("checkpoint, async: a failure of any rank ends all ranks at a later step, and the older checkpoint remains") {
    FakeState first = random_state(1), second = random_state(2);
    for (const std::string call : {"open", "write", "fsync"})
        for (int victim : {0, 1})
            for (bool wait : {false, true}) {
                CAPTURE(call, victim);
                TempDir dir;
                const Strings errors = run_ranks(2, [&](LocalComm& comm) {
                    std::atomic<bool> fails{false};
                    CheckpointRequest request = async_request(dir.path);
                    request.io_hook = [&](const char* name, const std::string& path) {
                        const bool chosen = comm.world().rank == victim && path.ends_with("optimizer/v.safetensors");
                        return fails && chosen && name == call ? EIO : 0;
                    };
                    AsyncSave run(first, comm, request);
                    run.save(first, 1);
                    run.saver.finish();
                    fails = true;
                    run.save(second, 2);   // no error here: nothing was written yet
                    if (wait) run.saver.finish();
                    else run.polls_until_saved(2);
                });
                for (const std::string& error : errors)
                    check_contains(error, {"exit 7: step-00000002 was not saved, rank " + std::to_string(victim)
                                               + ": cannot " + call, "optimizer/v.safetensors: Input/output error"});
                CHECK(list_directory(dir.path) == Strings{"step-00000001"});
                check_saved(dir.path, 1, first);
            }
}

TEST_CASE("checkpoint, async: an error elsewhere ends a running save, unless one rank alone can finish it") {
    for (int ranks : {1, 2}) {
        CAPTURE(ranks);
        TempDir dir;
        FakeState state = random_state(1);
        Gate gate;
        std::atomic<int> ended{0};
        const Strings errors = run_ranks(ranks, [&](LocalComm& comm) {
            CheckpointRequest request = async_request(dir.path);
            request.io_hook = gate.hook();
            AsyncSave run(state, comm, request);
            run.save(state, 1);
            run.saver.poll();
            if (++ended == ranks) gate.open = true;
            throw Error(kExitDiverged, "training diverged");
        });
        for (const std::string& error : errors) CHECK(error == "exit 4: training diverged");
        if (ranks == 1) check_saved(dir.path, 1, state);
        else CHECK(list_directory(dir.path).empty());
    }
}

namespace {

struct Kill {
    int ranks, victim;
    bool last, async;   // last: only after the other rank has come as far as it can without this one
};

// Saves a state on the ranks, which are killed at call `kill_at` of the victim or, with async, of its thread.
Strings save_killed(const Kill& kill, const std::string& root, FakeState& state, int64_t step, int64_t kill_at) {
    return run_ranks(kill.ranks, [&](LocalComm& comm) {
        std::atomic<int64_t> calls{0};
        CheckpointRequest request = request_of(root, step);
        request.async = kill.async, request.keep = 1;
        request.io_hook = [&, mine = comm.world().rank == kill.victim](const char*, const std::string&) {
            if (!mine || calls++ != kill_at) return 0;
            if (kill.last) comm.all().wait_for_the_others();
            raise(SIGKILL);
            return 0;
        };
        AsyncSave run(state, comm, request);
        run.save(state, step);
        run.polls_until_saved(1);   // as during training
    });
}

}  // namespace

TEST_CASE("checkpoint: kill -9 at each call of each rank or its thread leaves the older checkpoint or the new one") {
    FakeState first = random_state(1), second = random_state(2);
    const Kill kills[] = {{1, 0, false, false}, {2, 0, false, false}, {2, 0, true, false}, {2, 1, false, false},
                          {2, 1, true, false}, {2, 0, false, true}, {2, 1, false, true}};
    for (const Kill& kill : kills) {
        CAPTURE(kill.ranks, kill.victim, kill.last, kill.async);
        TempDir dir;
        CHECK(save_killed(kill, dir.path, first, 1, -1) == nothing(kill.ranks));
        int64_t survived = 0, replaced = 0;
        for (int64_t kill_at = 0;; kill_at++) {
            CAPTURE(kill_at);
            const pid_t child = fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                save_killed(kill, dir.path, second, 2, kill_at);
                _exit(0);
            }
            int status = 0;
            REQUIRE(waitpid(child, &status, 0) == child);
            const FoundCheckpoint found = find_checkpoint("auto", dir.path);
            CHECK(found.skipped.empty());
            const bool is_second = found.path == dir / "step-00000002";
            if (!WIFSIGNALED(status)) CHECK(is_second);
            else (is_second ? replaced : survived)++;
            check_saved(dir.path, is_second ? 2 : 1, is_second ? second : first);
            CHECK(save_killed(kill, dir.path, first, 1, -1) == nothing(kill.ranks));
            for (const std::string& name : list_directory(dir.path)) CHECK(step_of_directory(name) >= 0);
            remove_tree(dir / "step-00000002");
            if (!WIFSIGNALED(status)) break;
        }
        CHECK(survived > 25);
        CHECK((replaced > 1) == (kill.victim == 0));   // rank 0 publishes
    }
}

TEST_CASE("checkpoint: ranges are written through a small buffer to their offsets, with a hash of every part") {
    TempDir dir;
    const int64_t bytes = 2 * WriteBuffer::kHashBytes + 5;
    create_file(dir / "long", bytes);
    create_file(dir / "two", 20);
    CHECK(file_bytes(dir / "long") == bytes);
    check_contains(error_of([&] { create_file(dir / "two", 20); }), {"exit 7: cannot open", "two: File exists"});
    std::vector<char> memory(300000);
    WriteBuffer buffer(memory.data(), static_cast<int64_t>(memory.size()));
    buffer.reset({});
    buffer.set_directory(dir.path);
    auto put = [&](const std::string& text) {
        text.copy(buffer.room(static_cast<int64_t>(text.size())), text.size());
        buffer.filled(static_cast<int64_t>(text.size()));
    };
    buffer.begin("two", 12);
    put("worlds");
    buffer.begin("long", 0);
    Xxh3 expected;
    for (int64_t done = 0; done < bytes;) {
        const int64_t count = std::min<int64_t>(bytes - done, 250000);
        char* const block = buffer.room(count);
        std::memset(block, static_cast<int>(done / 250000 % 251), static_cast<size_t>(count));
        expected.update(block, count);
        buffer.filled(count);
        done += count;
    }
    buffer.begin("two", 5);
    put("hel");
    put("lo");
    buffer.begin("two", 10);   // begins where the last one ended
    put("ab");
    const std::vector<WriteBuffer::Written> written = buffer.finish();
    using Range = std::tuple<std::string, int64_t, int64_t>;
    std::vector<Range> ranges;
    for (const WriteBuffer::Written& w : written) {
        ranges.emplace_back(w.file, w.begin, w.bytes);
        CHECK(w.xxh3 == xxh3_of_range(dir / w.file, w.begin, w.bytes));
    }
    const int64_t part = WriteBuffer::kHashBytes;
    CHECK(ranges == std::vector<Range>{{"long", 0, part}, {"long", part, part}, {"two", 12, 6}, {"long", 2 * part, 5},
                                       {"two", 5, 7}});
    CHECK(slurp(dir / "two") == std::string(5, '\0') + "helloabworlds" + std::string(2, '\0'));
    CHECK(xxh3_of_range(dir / "long", 0, bytes) == expected.digest());
}

TEST_CASE("checkpoint: a buffer writes fp32 values a second time, rounded or as they are, whole or in blocks") {
    const std::vector<float> values = [] {
        std::vector<float> random(5003);
        for (size_t i = 0; i < random.size(); i++) {
            const uint32_t bits = philox(9, i).word[0];   // also NaN and subnormal numbers
            std::memcpy(&random[i], &bits, 4);
        }
        return random;
    }();
    const std::vector<bf16> rounded(values.begin(), values.end());
    const std::string wide(reinterpret_cast<const char*>(values.data()), values.size() * 4);
    const std::string narrow(reinterpret_cast<const char*>(rounded.data()), rounded.size() * 2);
    for (Dtype dtype : {Dtype::kBf16, Dtype::kFp32})
        for (int64_t block : {4, 1236, 20012}) {
            CAPTURE(block);
            TempDir dir;
            const std::string expected = dtype == Dtype::kFp32 ? wide : narrow;
            create_file(dir / "masters", 8 + static_cast<int64_t>(wide.size()));
            create_file(dir / "weights", 6 + static_cast<int64_t>(expected.size()));
            std::vector<char> memory(static_cast<size_t>(std::max<int64_t>(block, 3000)));
            WriteBuffer buffer(memory.data(), static_cast<int64_t>(memory.size()));
            buffer.reset({});
            buffer.set_directory(dir.path);
            buffer.begin("masters", 8, WriteBuffer::Copy{"weights", 6, dtype});
            for (size_t done = 0; done < wide.size(); done += static_cast<size_t>(block)) {
                const std::string part = wide.substr(done, static_cast<size_t>(block));
                part.copy(buffer.room(static_cast<int64_t>(part.size())), part.size());
                buffer.filled(static_cast<int64_t>(part.size()));
            }
            const std::vector<WriteBuffer::Written> written = buffer.finish();
            REQUIRE(written.size() == 2);   // each file has one range, however often the buffer was full
            for (const WriteBuffer::Written& w : written)
                CHECK(w.xxh3 == xxh3_of_range(dir / w.file, w.begin, w.bytes));
            CHECK(slurp(dir / "masters") == std::string(8, '\0') + wide);
            CHECK(slurp(dir / "weights") == std::string(6, '\0') + expected);
        }
}
