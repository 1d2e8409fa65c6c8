#include "llmc/checkpoint/checkpoint_save.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/host.h"
#include "llmc/base/process_limits.h"
#include "llmc/base/signals_blocked.h"
#include "llmc/base/text.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/hf_code.h"
#include "llmc/checkpoint/hf_config.h"

namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

// Manifest without hashes, directory entries, and each file's last partly filled block.
constexpr int64_t kSlackBytes = 128 << 10;
constexpr int64_t kManifestRangeBytes = 192;   // one hash with its range

// The outcome of a stage on one rank: a text for the other ranks, or an error.
struct Outcome {
    int exit_code = kExitOk;
    std::string text;
};

Outcome outcome_of(const std::function<std::string()>& work) {
    try {
        return {kExitOk, work()};
    } catch (const std::exception& error) {
        const Error said = as_error(error);
        return {said.exit_code, said.what()};
    }
}

void raise(const Outcome& outcome) {
    if (outcome.exit_code != kExitOk) throw Error(outcome.exit_code, outcome.text);
}

// Gathers the texts of all ranks; if one failed, raises the error of the lowest such rank on every rank.
std::vector<std::string> gather_outcomes(Comm& comm, const Outcome& mine, const std::string& what) {
    std::vector<std::string> texts = comm.gather(static_cast<char>(mine.exit_code) + mine.text);
    for (size_t rank = 0; rank < texts.size(); rank++) {
        const int exit_code = texts[rank].at(0);
        texts[rank].erase(0, 1);
        if (exit_code == kExitOk) continue;
        if (texts.size() == 1) throw Error(exit_code, texts[rank]);
        throw Error(exit_code, strf("%s, rank %zu: %s", what.c_str(), rank, texts[rank].c_str()));
    }
    return texts;
}

// Runs one function at a time, in the calling thread or in a new one.
class Job {
public:
    ~Job() { wait(); }

    void start(std::function<std::string()> work, bool in_thread) {
        done_ = false;
        auto run = [this, work = std::move(work)] {
            outcome_ = outcome_of(work);
            done_ = true;
        };
        if (!in_thread) return run();
        const SignalsBlocked blocked;
        thread_ = std::thread(run);
    }
    bool done() const { return done_; }
    const Outcome& wait() {
        if (thread_.joinable()) thread_.join();
        return outcome_;
    }

private:
    std::thread thread_;
    std::atomic<bool> done_{true};
    Outcome outcome_;
};

HeldByRank gather_held(const StateAccess& access, const ParamTable& table, Comm& comm) {
    const ElementRange end_of_param{-1, -1};
    std::vector<ElementRange> mine;
    for (size_t p = 0; p < table.params.size(); p++) {
        for (const ElementRange& part :
             held_within(access, StateKind::kMaster, static_cast<int>(p), {0, table.params[p].elems()}))
            mine.push_back(part);
        mine.push_back(end_of_param);
    }
    HeldByRank held;
    for (const std::string& text :
         comm.gather({reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(ElementRange)})) {
        auto& by_param = held.emplace_back(1);
        for (size_t at = 0; at < text.size(); at += sizeof(ElementRange)) {
            ElementRange part;
            std::memcpy(&part, text.data() + at, sizeof part);
            if (part.count < 0) by_param.emplace_back();
            else by_param.back().push_back(part);
        }
        by_param.pop_back();
        CHECK(by_param.size() == table.params.size(), "ranks save different models");
    }
    return held;
}

// Bytes of the longest row of a transposed matrix; such a row is written in one block.
int64_t longest_row_bytes(const SaveLayout& layout) {
    int64_t bytes = 1;
    for (const SavedTensor& saved : layout.tensors)
        if (saved.tensor.part.transposed)
            bytes = std::max(bytes, saved.tensor.part.rows * dtype_bytes(saved.tensor.entry.dtype));
    return bytes;
}

// Exit 2 unless every rank sees a directory that rank 0 creates under root. Its name contains the time, so that no
// client of a network file system has cached it as absent.
void require_shared(const std::string& root, Comm& comm) {
    if (comm.world().ranks == 1) return;
    const long long now = std::chrono::system_clock::now().time_since_epoch().count();
    const std::string probe = strf("%s/.tmp-step-seen-by-all.%d.%lld", root.c_str(), getpid(), now);
    auto make = [&] {
        make_directories(root);
        make_directory(probe);
        return probe;
    };
    const std::string made = gather_outcomes(comm, comm.root() ? outcome_of(make) : Outcome{},
                                             "--save cannot be used")[0];
    const auto answers = comm.gather((is_directory(made) ? "y" : "n") + host_name());
    if (comm.root()) remove_tree(probe);
    for (size_t rank = 1; rank < answers.size(); rank++)
        REQUIRE(answers[rank][0] == 'y',
                "--save %s: rank %zu on %s does not see there what rank 0 on %s wrote: it must be on storage that all "
                "ranks share", root.c_str(), rank, answers[rank].c_str() + 1, answers[0].c_str() + 1);
}

}  // namespace

int64_t save_buffer_bytes(const SaveLayout& layout, const SaveOptions& options, int rank, bool gathers_weights) {
    if (options.async) return layout.buffer_bytes(rank);
    // While one rank writes a tensor, the others wait to gather the next one. A larger buffer lets a rank go on before
    // it writes, so that more ranks write at the same time.
    const int64_t blocks = gathers_weights ? 8 : 1;
    return WriteBuffer::aligned(std::max(blocks * options.staging_bytes, longest_row_bytes(layout)));
}

struct CheckpointSaver::Impl {
    enum class Stage { kIdle, kPrepare, kWrite, kCommit };

    Impl(const SaveOptions& options_, const ModelConfig& config_, const ParamTable& table_,
         const StateAccess& access_, Comm& comm_)
        : options(options_), config(config_), table(table_), access(access_), comm(comm_),
          layout(make_save_layout(table, access.dtypes, gather_held(access, table, comm), options.max_part_bytes)),
          buffer_bytes(save_buffer_bytes(layout, options, comm.world().rank, bool(access.gather_weight))),
          memory(static_cast<char*>(device::pinned_alloc(buffer_bytes))), buffer(memory, buffer_bytes) {}
    ~Impl();

    void begin(int64_t step_, const std::string& state_json_);
    void next();
    // Adds the time since `entered` to stall_seconds.
    void leave() {
        left = Clock::now();
        stall_seconds += std::chrono::duration<double>(left - std::exchange(entered, left)).count();
    }
    void advance(const std::vector<std::string>& texts);
    std::string prepare();
    std::string write();
    std::string commit(const std::vector<std::string>& written);
    void fill();
    void fill_text(const std::string& file, const std::string& text);
    void fill_range(const SlotFile& file, const SavedRange& range);
    int64_t checkpoint_bytes() const;

    const SaveOptions options;
    const ModelConfig config;
    const ParamTable& table;
    const StateAccess access;
    Comm& comm;
    const SaveLayout layout;
    ModelExtras extras;   // on rank 0
    const int64_t buffer_bytes;
    char* const memory;
    WriteBuffer buffer;
    std::function<void(const SavedCheckpoint&)> on_saved;

    Stage stage = Stage::kIdle;
    int64_t step = 0;
    std::string state_json;
    Clock::time_point started, entered, left;  // start of the save; start and end of the latest call
    double stall_seconds = 0;
    Outcome filled;                            // async: of copying the state to the buffer
    std::unique_ptr<StagedDirectory> staged;   // on rank 0
    Job job;                                   // last, so that it ends before the members that it uses
};

CheckpointSaver::Impl::~Impl() {
    const bool alone = comm.world().ranks == 1;
    if (!alone) buffer.cancel();
    try {
        while (alone && stage != Stage::kIdle) next();
    } catch (const std::exception&) {
        // The run is ending with another error; earlier checkpoints are intact.
    }
    job.wait();
    device::pinned_free(memory);
}

// ---- stages ----

void CheckpointSaver::Impl::begin(int64_t step_, const std::string& state_json_) {
    CHECK(Json::accept(state_json_), "state.json would not be JSON");
    step = step_;
    state_json = state_json_;
    started = entered;
    stall_seconds = 0;
    filled = {};
    buffer.reset(options.io_hook);
    auto copy = [&] { return fill(), ""; };
    if (options.async) filled = outcome_of(copy);
    stage = Stage::kPrepare;
    job.start([this] { return prepare(); }, options.async);
}

// Waits for the running stage on all ranks and starts the next one.
void CheckpointSaver::Impl::next() {
    const Outcome mine = job.wait();
    try {
        advance(gather_outcomes(comm, mine, step_directory_name(step) + " was not saved"));
    } catch (...) {
        stage = Stage::kIdle;
        buffer.reset({});
        staged.reset();
        throw;
    }
}

void CheckpointSaver::Impl::advance(const std::vector<std::string>& texts) {
    switch (stage) {
        case Stage::kPrepare:
            buffer.set_directory(texts[0]);
            stage = Stage::kWrite;
            return job.start([this] { return write(); }, options.async);
        case Stage::kWrite:
            stage = Stage::kCommit;
            return job.start([this, texts] { return comm.root() ? commit(texts) : ""; }, options.async);
        default:
            stage = Stage::kIdle;
            staged.reset();
            leave();
            if (on_saved)
                on_saved({step, texts[0], std::chrono::duration<double>(left - started).count(), stall_seconds});
    }
}

std::string CheckpointSaver::Impl::prepare() {
    raise(filled);
    if (!comm.root()) return "";
    make_directories(options.root, options.io_hook);
    if (options.lock) options.lock->require_held();
    remove_leftovers(options.root);
    int64_t needed = checkpoint_bytes() + static_cast<int64_t>(state_json.size());
    std::vector<ModelFile> small = hf_code(config);
    small.insert(small.end(), extras.files.begin(), extras.files.end());
    for (const ModelFile& file : small) needed += static_cast<int64_t>(file.bytes.size());
    require_free_space(options.root, needed, step_directory_name(step));

    staged = std::make_unique<StagedDirectory>(options.root, step_directory_name(step), options.io_hook);
    staged->write_text("config.json",
                       hf_config_json(config, access.dtypes.weight, options.seq_length, extras.origin));
    staged->make_subdirectory("optimizer");
    for (const SavedFile& file : layout.files) create_file(staged->path(file.name), file.bytes, options.io_hook);
    if (!layout.index_json.empty()) staged->write_text("model.safetensors.index.json", layout.index_json);
    for (const ModelFile& file : small) staged->write_text(file.name, file.bytes);
    staged->write_text("state.json", state_json);
    return staged->directory();
}

std::string CheckpointSaver::Impl::write() {
    if (!options.async) fill();
    Json list = Json::array();
    for (const WriteBuffer::Written& range : buffer.finish())
        list.push_back({range.file, range.begin, range.bytes, range.xxh3});
    return list.dump();
}

std::string CheckpointSaver::Impl::commit(const std::vector<std::string>& written) {
    Manifest files;
    for (const SavedFile& file : layout.files) files[file.name].bytes = file.bytes;
    for (size_t rank = 0; rank < written.size(); rank++)
        for (const Json& range : Json::parse(written[rank]))
            files[range[0].get<std::string>()].ranges.push_back(
                {.begin = range[1].get<int64_t>(), .bytes = range[2].get<int64_t>(), .rank = static_cast<int>(rank),
                 .xxh3 = range[3].get<std::string>()});
    for (auto& [name, file] : files) {
        std::sort(file.ranges.begin(), file.ranges.end(),
                  [](const HashedRange& a, const HashedRange& b) { return a.begin < b.begin; });
        staged->add(name, file);
    }
    if (options.lock) options.lock->require_held();
    const std::string path = staged->commit();
    drop_old_checkpoints(options.root, step, options.keep, options.io_hook);
    return path;
}

// ---- what this rank writes ----

// Weights come first, because gathering them is collective: a rank that failed goes on gathering for the others.
void CheckpointSaver::Impl::fill() {
    const int rank = comm.world().rank;
    Outcome outcome;
    auto attempt = [&](const std::function<void()>& copy) {
        if (outcome.exit_code == kExitOk) outcome = outcome_of([&] { return copy(), ""; });
    };
    int gathered = -1;
    auto gather_up_to = [&](int param) {
        while (gathered < param && access.gather_weight) access.gather_weight(++gathered);
    };
    for (const SavedTensor& saved : layout.tensors) {
        gather_up_to(saved.tensor.param);
        if (saved.rank != rank) continue;
        attempt([&] {
            buffer.begin(layout.files[static_cast<size_t>(saved.file)].name, saved.offset);
            export_tensor(table, saved.tensor, access, options.staging_bytes, buffer);
        });
    }
    for (size_t i = 0; i < layout.files.size() && comm.root(); i++)
        attempt([&] { fill_text(layout.files[i].name, layout.files[i].header); });
    for (const SlotFile& file : layout.slot_files)
        for (const SavedRange& range : layout.ranges)
            if (range.rank == rank && file.has(range.param)) attempt([&] { fill_range(file, range); });
    raise(outcome);
}

void CheckpointSaver::Impl::fill_text(const std::string& file, const std::string& text) {
    buffer.begin(file, 0);
    const int64_t size = static_cast<int64_t>(text.size());
    for (int64_t done = 0; done < size; done += options.staging_bytes) {
        const int64_t bytes = std::min(options.staging_bytes, size - done);
        std::memcpy(buffer.room(bytes), text.data() + done, static_cast<size_t>(bytes));
        buffer.filled(bytes);
    }
}

void CheckpointSaver::Impl::fill_range(const SlotFile& file, const SavedRange& range) {
    const int64_t element = file.element_bytes;
    const int64_t step_elems = std::max<int64_t>(1, options.staging_bytes / element);
    const int64_t first = file.offsets[static_cast<size_t>(range.param)];
    buffer.begin(file.slot->file, first + range.begin * element);
    for (int64_t done = 0; done < range.count; done += step_elems) {
        const int64_t count = std::min(step_elems, range.count - done);
        access.read(file.slot->kind, range.param, range.begin + done, count, buffer.room(count * element));
        buffer.filled(count * element);
    }
}

int64_t CheckpointSaver::Impl::checkpoint_bytes() const {
    const int64_t segments = static_cast<int64_t>(layout.tensors.size() + layout.files.size()
                                                  + layout.ranges.size() * layout.slot_files.size());
    const int64_t hashes = segments + layout.bytes() / WriteBuffer::kHashBytes;
    return layout.bytes() + kSlackBytes + kManifestRangeBytes * hashes
           + static_cast<int64_t>(hf_config_json(config, access.dtypes.weight).size());
}

// ---- calls ----

CheckpointSaver::CheckpointSaver(const SaveOptions& options, const ModelConfig& config, const ParamTable& table,
                                 const StateAccess& access, Comm& comm) {
    require_shared(options.root, comm);
    impl_ = std::make_unique<Impl>(options, config, table, access, comm);
}
CheckpointSaver::~CheckpointSaver() = default;

void CheckpointSaver::on_saved(std::function<void(const SavedCheckpoint&)> callback) {
    impl_->on_saved = std::move(callback);
}

void CheckpointSaver::carry(const std::string& directory, const std::string& tokenizer) {
    auto read = [&] { return impl_->extras = read_model_extras(directory, tokenizer), ""; };
    gather_outcomes(impl_->comm, impl_->comm.root() ? outcome_of(read) : Outcome{}, "--save cannot be used");
}

void CheckpointSaver::save(int64_t step, const std::string& state_json) {
    finish();
    impl_->entered = Clock::now();
    impl_->begin(step, state_json);
    impl_->leave();
    if (!impl_->options.async) finish();
}

void CheckpointSaver::poll() {
    if (impl_->stage == Impl::Stage::kIdle) return;
    impl_->entered = Clock::now();
    const int64_t done = impl_->comm.sum(std::vector<int64_t>{impl_->job.done()})[0];
    if (done == impl_->comm.world().ranks) impl_->next();
    impl_->leave();
}

void CheckpointSaver::finish() {
    impl_->entered = Clock::now();
    while (impl_->stage != Impl::Stage::kIdle) impl_->next();
    impl_->leave();
}

void CheckpointSaver::require_room(int64_t count) {
    Comm& comm = impl_->comm;
    auto look = [&] {
        int64_t needed = 0;
        if (__builtin_mul_overflow(count, impl_->checkpoint_bytes(), &needed)) needed = INT64_MAX;
        require_free_space(existing_part(impl_->options.root), needed,
                           count_text(count, "checkpoint") + " of --save " + impl_->options.root);
        return std::string();
    };
    gather_outcomes(comm, comm.root() ? outcome_of(look) : Outcome{}, "--save cannot be used");
}

int64_t CheckpointSaver::buffer_bytes() const { return impl_->buffer_bytes; }
int64_t CheckpointSaver::checkpoint_bytes() const { return impl_->checkpoint_bytes(); }
