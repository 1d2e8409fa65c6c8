#include "llmc/checkpoint/checkpoint_save.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "llmc/base/check.h"
#include "llmc/base/system/host.h"
#include "llmc/base/system/signals_blocked.h"
#include "llmc/base/text.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/hf_code.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/rank_outcome.h"

namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;

// Manifest without hashes, directory entries, and each file's last partly filled block.
constexpr int64_t kSlackBytes = 128 << 10;
constexpr int64_t kManifestRangeBytes = 192;   // one hash with its range

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
    const RankOutcome& wait() {
        if (thread_.joinable()) thread_.join();
        return outcome_;
    }

private:
    std::thread thread_;
    std::atomic<bool> done_{true};
    RankOutcome outcome_;
};

HeldByRank gather_held(const StateAccess& access, const ParamTable& table, Comm& comm) {
    const ElementRange end_of_param{-1, -1};
    std::vector<ElementRange> mine;
    for (size_t p = 0; p < table.params.size(); p++) {
        for (const ElementRange& part :
             held_within(access, static_cast<int>(p), {0, table.params[p].elems()}))
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
    const std::string made = gather_outcomes(comm, comm.root() ? outcome_of(make) : RankOutcome{},
                                             "--save cannot be used")[0];
    const auto answers = comm.gather((is_directory(made) ? "y" : "n") + host_name());
    if (comm.root()) remove_tree(probe);
    for (size_t rank = 1; rank < answers.size(); rank++)
        REQUIRE(answers[rank][0] == 'y',
                "--save %s: rank %zu on %s does not see there what rank 0 on %s wrote: it must be on storage that all "
                "ranks share", root.c_str(), rank, answers[rank].c_str() + 1, answers[0].c_str() + 1);
}

}  // namespace

int64_t save_buffer_bytes(const SaveLayout& layout, const SaveOptions& options, int rank) {
    int64_t bytes = options.async ? layout.buffer_bytes(rank) : options.staging_bytes;
    for (const TransposedTensor& saved : layout.transposed)
        if (saved.rank == rank) bytes = std::max(bytes, transposed_room_bytes(saved.tensor, options.staging_bytes));
    return WriteBuffer::aligned(bytes);
}

struct CheckpointSaver::Impl {
    enum class Stage { kIdle, kPrepare, kWrite, kTranspose, kCommit };

    Impl(const SaveOptions& options_, const ModelConfig& config_, const ParamTable& table_,
         const StateAccess& access_, Comm& comm_)
        : options(options_), config(config_), table(table_), access(access_), comm(comm_),
          layout(make_save_layout(table, access.dtypes, gather_held(access, table, comm), options.max_part_bytes)),
          buffer_bytes(save_buffer_bytes(layout, options, comm.world().rank)),
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
    std::string transpose();
    std::string written_ranges();
    std::string commit();
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
    std::string directory;                     // in which the files are until they are complete
    std::vector<std::string> written;          // written_ranges() of every rank in every stage, by rank and stage
    Clock::time_point started, entered, left;  // start of the save; start and end of the latest call
    double stall_seconds = 0;
    RankOutcome filled;                          // async: of copying the state to the buffer
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
    const RankOutcome mine = job.wait();
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
            directory = texts[0];
            buffer.set_directory(directory);
            stage = Stage::kWrite;
            return job.start([this] { return write(); }, options.async);
        case Stage::kWrite:
            written = texts;
            if (layout.transposed.empty()) break;
            stage = Stage::kTranspose;
            return job.start([this] { return transpose(); }, options.async);
        case Stage::kTranspose:
            written.insert(written.end(), texts.begin(), texts.end());
            break;
        default:
            stage = Stage::kIdle;
            staged.reset();
            leave();
            if (on_saved)
                on_saved({step, texts[0], std::chrono::duration<double>(left - started).count(), stall_seconds});
            return;
    }
    stage = Stage::kCommit;
    job.start([this] { return comm.root() ? commit() : ""; }, options.async);
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
    return written_ranges();
}

// The masters' file is complete now, and the buffer is free.
std::string CheckpointSaver::Impl::transpose() {
    const SlotFile& masters = layout.slot_files[0];
    const InputFile file(directory + "/" + masters.slot->file, masters.slot->file);
    for (const TransposedTensor& saved : layout.transposed) {
        if (saved.rank != comm.world().rank) continue;
        const int64_t first = masters.offsets[static_cast<size_t>(saved.tensor.param)];
        auto read = [&](int64_t begin, int64_t count, float* out) { file.read(first + begin * 4, count * 4, out); };
        export_transposed(saved.tensor, layout.files[static_cast<size_t>(saved.place.file)].name, saved.place.offset,
                          read, options.staging_bytes, buffer);
    }
    return written_ranges();
}

std::string CheckpointSaver::Impl::written_ranges() {
    Json list = Json::array();
    for (const WriteBuffer::Written& range : buffer.finish())
        list.push_back({range.file, range.begin, range.bytes, range.xxh3});
    return list.dump();
}

std::string CheckpointSaver::Impl::commit() {
    Manifest files;
    for (const SavedFile& file : layout.files) files[file.name].bytes = file.bytes;
    for (size_t i = 0; i < written.size(); i++)
        for (const Json& range : Json::parse(written[i]))
            files[range[0].get<std::string>()].ranges.push_back(
                {.begin = range[1].get<int64_t>(), .bytes = range[2].get<int64_t>(),
                 .rank = static_cast<int>(i) % comm.world().ranks, .xxh3 = range[3].get<std::string>()});
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

void CheckpointSaver::Impl::fill() {
    const int rank = comm.world().rank;
    for (size_t i = 0; i < layout.files.size() && comm.root(); i++)
        fill_text(layout.files[i].name, layout.files[i].header);
    for (const SlotFile& file : layout.slot_files)
        for (const SavedRange& range : layout.ranges)
            if (range.rank == rank && file.has(range.param)) fill_range(file, range);
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
    std::optional<WriteBuffer::Copy> weight;
    if (file.slot->kind == StateKind::kMaster && range.weight.file >= 0)
        weight = {layout.files[static_cast<size_t>(range.weight.file)].name, range.weight.offset, access.dtypes.weight};
    buffer.begin(file.slot->file, first + range.begin * element, weight);
    for (int64_t done = 0; done < range.count; done += step_elems) {
        const int64_t count = std::min(step_elems, range.count - done);
        access.read(file.slot->kind, range.param, range.begin + done, count, buffer.room(count * element));
        buffer.filled(count * element);
    }
}

int64_t CheckpointSaver::Impl::checkpoint_bytes() const {
    const int64_t segments = static_cast<int64_t>(layout.transposed.size() + layout.files.size()
                                                  + layout.ranges.size() * (layout.slot_files.size() + 1));
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
    gather_outcomes(impl_->comm, impl_->comm.root() ? outcome_of(read) : RankOutcome{}, "--save cannot be used");
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
    gather_outcomes(comm, comm.root() ? outcome_of(look) : RankOutcome{}, "--save cannot be used");
}

int64_t CheckpointSaver::buffer_bytes() const { return impl_->buffer_bytes; }
int64_t CheckpointSaver::checkpoint_bytes() const { return impl_->checkpoint_bytes(); }
