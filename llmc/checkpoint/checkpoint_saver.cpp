#include "llmc/checkpoint/checkpoint_saver.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "llmc/base/system/host.h"
#include "llmc/base/system/threads.h"

namespace {

using Json = nlohmann::json;

// Manifest without hashes, directory entries, and each file's last partly filled block.
constexpr int64_t kSlackBytes = 128 << 10;
constexpr int64_t kManifestRangeBytes = 192;   // one hash with its range

HeldByRank gather_held(const StateAccess& access, const ParamTable& table, Comm& comm) {
    const ElementRange end_of_param{-1, -1};
    std::vector<ElementRange> mine;
    for (size_t p = 0; p < table.params.size(); p++) {
        for (const ElementRange& part : held_within(access, static_cast<int>(p), {0, table.params[p].elems()}))
            mine.push_back(part);
        mine.push_back(end_of_param);
    }
    HeldByRank held;
    for (const std::vector<ElementRange>& parts : gather_values(comm, mine)) {
        auto& by_param = held.emplace_back(1);
        for (const ElementRange& part : parts) {
            if (part.count < 0) by_param.emplace_back();
            else by_param.back().push_back(part);
        }
        by_param.pop_back();
        CHECK(by_param.size() == table.params.size(), "ranks save different models");
    }
    return held;
}

// Returns the options; exit 2 unless every rank sees a directory that rank 0 creates under the root. Its name contains
// the time, so that no client of a network file system has cached it as absent.
const SaveOptions& require_shared(const SaveOptions& options, Comm& comm) {
    const std::string& root = options.root;
    if (comm.world().ranks == 1) return options;
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
    return options;
}

}  // namespace

int64_t save_buffer_bytes(const SaveLayout& layout, const SaveOptions& options, int rank) {
    int64_t bytes = options.async ? layout.buffer_bytes(rank) : options.staging_bytes;
    for (const TransposedTensor& saved : layout.transposed)
        if (saved.rank == rank) bytes = std::max(bytes, transposed_room_bytes(saved.tensor, options.staging_bytes));
    return WriteBuffer::aligned(bytes);
}

CheckpointSaver::CheckpointSaver(const SaveOptions& options, const ModelConfig& config, const ParamTable& table,
                                 const StateAccess& access, Comm& comm)
    : options_(require_shared(options, comm)), config_(config), access_(access), comm_(comm),
      layout_(make_save_layout(table, access.dtypes, gather_held(access, table, comm), options.max_part_bytes)),
      buffer_bytes_(save_buffer_bytes(layout_, options, comm.world().rank)),
      memory_(static_cast<char*>(device::pinned_alloc(buffer_bytes_))), buffer_(memory_, buffer_bytes_) {}

CheckpointSaver::~CheckpointSaver() {
    const bool alone = comm_.world().ranks == 1;
    if (!alone) buffer_.cancel();
    try {
        while (alone && stage_ != Stage::kIdle) next();
    } catch (const std::exception&) {
        // The run is ending with another error; earlier checkpoints are intact.
    }
    if (options_.async && job_.valid()) job_.wait();
    device::pinned_free(memory_);
}

// ---- calls ----

void CheckpointSaver::carry(const std::string& directory, const std::string& tokenizer,
                            const TokenizerFacts& facts) {
    auto read = [&] { return extras_ = read_model_extras(directory, tokenizer, facts), ""; };
    gather_outcomes(comm_, comm_.root() ? outcome_of(read) : RankOutcome{}, "--save cannot be used");
}

void CheckpointSaver::save(int64_t step, const std::string& state_json) {
    finish();
    CHECK(Json::accept(state_json), "state.json would not be JSON");
    started_ = entered_ = Clock::now();
    step_ = step;
    state_json_ = state_json;
    stall_seconds_ = 0;
    filled_ = {};
    buffer_.reset(options_.io_hook);
    if (options_.async) filled_ = outcome_of([&] { return fill(), ""; });
    start(Stage::kPrepare, &CheckpointSaver::prepare);
    leave();
    if (!options_.async) finish();
}

void CheckpointSaver::poll() {
    if (stage_ == Stage::kIdle) return;
    entered_ = Clock::now();
    const bool done = job_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    if (comm_.sum(std::vector<int64_t>{done})[0] == comm_.world().ranks) next();
    leave();
}

void CheckpointSaver::finish() {
    entered_ = Clock::now();
    while (stage_ != Stage::kIdle) next();
    leave();
}

void CheckpointSaver::require_room(int64_t count) {
    auto look = [&] {
        int64_t needed = 0;
        if (__builtin_mul_overflow(count, checkpoint_bytes(), &needed)) needed = INT64_MAX;
        require_free_space(existing_part(options_.root), needed,
                           count_text(count, "checkpoint") + " of --save " + options_.root);
        return "";
    };
    gather_outcomes(comm_, comm_.root() ? outcome_of(look) : RankOutcome{}, "--save cannot be used");
}

int64_t CheckpointSaver::checkpoint_bytes() const {
    const int64_t segments = static_cast<int64_t>(layout_.transposed.size() + layout_.files.size()
                                                  + layout_.ranges.size() * (layout_.state_files.size() + 1));
    const int64_t hashes = segments + layout_.bytes() / WriteBuffer::kHashBytes;
    return layout_.bytes() + kSlackBytes + kManifestRangeBytes * hashes
           + layout_.models() * static_cast<int64_t>(hf_config_json(config_, access_.dtypes.weight).size());
}

// ---- stages ----

void CheckpointSaver::start(Stage stage, std::string (CheckpointSaver::*work)()) {
    stage_ = stage;
    const SignalsBlocked blocked;   // for the thread
    job_ = std::async(options_.async ? std::launch::async : std::launch::deferred,
                      [this, work] { return outcome_of([&] { return (this->*work)(); }); });
}

void CheckpointSaver::leave() {
    left_ = Clock::now();
    stall_seconds_ += std::chrono::duration<double>(left_ - std::exchange(entered_, left_)).count();
}

// Waits for the running stage on all ranks and starts the next one.
void CheckpointSaver::next() {
    RankOutcome mine = job_.get();
    if (mine.exit_code == kExitBadInput) mine.exit_code = kExitDisk;   // a save reads what it has written itself
    try {
        advance(gather_outcomes(comm_, mine, step_directory_name(step_) + " was not saved"));
    } catch (...) {
        stage_ = Stage::kIdle;
        buffer_.reset({});
        staged_.reset();
        throw;
    }
}

void CheckpointSaver::advance(const std::vector<std::string>& texts) {
    switch (stage_) {
        case Stage::kPrepare:
            directory_ = texts[0];
            buffer_.set_directory(directory_);
            return start(Stage::kWrite, &CheckpointSaver::write);
        case Stage::kWrite:
            written_ = texts;
            if (layout_.transposed.empty()) break;
            return start(Stage::kTranspose, &CheckpointSaver::transpose);
        case Stage::kTranspose:
            written_.insert(written_.end(), texts.begin(), texts.end());
            break;
        default:
            stage_ = Stage::kIdle;
            staged_.reset();
            leave();
            if (on_saved_)
                on_saved_({step_, texts[0], std::chrono::duration<double>(left_ - started_).count(), stall_seconds_});
            return;
    }
    start(Stage::kCommit, &CheckpointSaver::commit);
}

std::string CheckpointSaver::prepare() {
    raise(filled_);
    if (!comm_.root()) return "";
    make_directories(options_.root, options_.io_hook);
    if (options_.lock) options_.lock->require_held();
    remove_leftovers(options_.root);
    int64_t needed = checkpoint_bytes() + static_cast<int64_t>(state_json_.size());
    std::vector<ModelFile> small = hf_code(config_);
    small.insert(small.end(), extras_.files.begin(), extras_.files.end());
    for (const ModelFile& file : small) needed += layout_.models() * static_cast<int64_t>(file.bytes.size());
    if (!layout_.index_json.empty()) small.push_back({"model.safetensors.index.json", layout_.index_json});
    small.push_back({"config.json", hf_config_json(config_, access_.dtypes.weight, options_.seq_length,
                                                   extras_.origin)});
    require_free_space(options_.root, needed, step_directory_name(step_));

    staged_ = std::make_unique<StagedDirectory>(options_.root, step_directory_name(step_), options_.io_hook);
    staged_->make_subdirectory("optimizer");
    for (const StateFile& state : layout_.state_files) {
        if (state.model < 0) continue;
        const std::string folder = state.state->model;
        if (!folder.empty()) staged_->make_subdirectory(folder.substr(0, folder.size() - 1));
        for (const ModelFile& file : small) staged_->write_text(folder + file.name, file.bytes);
    }
    for (const SavedFile& file : layout_.files) create_file(staged_->path(file.name), file.bytes, options_.io_hook);
    staged_->write_text("state.json", state_json_);
    return staged_->directory();
}

std::string CheckpointSaver::write() {
    if (!options_.async) fill();
    return written_ranges();
}

// The files of masters and EMA are complete now, and the buffer is free.
std::string CheckpointSaver::transpose() {
    for (const TransposedTensor& saved : layout_.transposed) {
        if (saved.rank != comm_.world().rank) continue;
        const StateFile& masters = layout_.state_files[static_cast<size_t>(saved.state)];
        const InputFile file(directory_ + "/" + masters.state->file, masters.state->file);
        const int64_t first = masters.offsets[static_cast<size_t>(saved.tensor.param)];
        auto read = [&](int64_t begin, int64_t count, float* out) { file.read(first + begin * 4, count * 4, out); };
        export_transposed(saved.tensor, layout_.files[static_cast<size_t>(saved.place.file)].name, saved.place.offset,
                          read, options_.staging_bytes, buffer_);
    }
    return written_ranges();
}

std::string CheckpointSaver::written_ranges() {
    Json list = Json::array();
    for (const WriteBuffer::Written& range : buffer_.finish())
        list.push_back({range.file, range.begin, range.bytes, range.xxh3});
    return list.dump();
}

std::string CheckpointSaver::commit() {
    if (!comm_.root()) return "";
    Manifest files;
    for (const SavedFile& file : layout_.files) files[file.name].bytes = file.bytes;
    for (size_t i = 0; i < written_.size(); i++)
        for (const Json& range : Json::parse(written_[i]))
            files[range[0].get<std::string>()].ranges.push_back(
                {.begin = range[1].get<int64_t>(), .bytes = range[2].get<int64_t>(),
                 .rank = static_cast<int>(i) % comm_.world().ranks, .xxh3 = range[3].get<std::string>()});
    for (auto& [name, file] : files) {
        std::sort(file.ranges.begin(), file.ranges.end(),
                  [](const HashedRange& a, const HashedRange& b) { return a.begin < b.begin; });
        staged_->add(name, file);
    }
    if (options_.lock) options_.lock->require_held();
    const std::string path = staged_->commit();
    drop_old_checkpoints(options_.root, step_, options_.keep, options_.io_hook);
    return path;
}

// ---- what this rank writes ----

void CheckpointSaver::fill() {
    const int rank = comm_.world().rank;
    for (size_t i = 0; i < layout_.files.size() && comm_.root(); i++)
        fill_text(layout_.files[i].name, layout_.files[i].header);
    for (const StateFile& file : layout_.state_files)
        for (const SavedRange& range : layout_.ranges)
            if (range.rank == rank && file.has(range.param)) fill_range(file, range);
}

void CheckpointSaver::fill_text(const std::string& file, const std::string& text) {
    buffer_.begin(file, 0);
    const int64_t size = static_cast<int64_t>(text.size());
    for (int64_t done = 0; done < size; done += options_.staging_bytes) {
        const int64_t bytes = std::min(options_.staging_bytes, size - done);
        std::memcpy(buffer_.room(bytes), text.data() + done, static_cast<size_t>(bytes));
        buffer_.filled(bytes);
    }
}

void CheckpointSaver::fill_range(const StateFile& file, const SavedRange& range) {
    const int64_t bytes = file.value_bytes;
    const int64_t step = std::max<int64_t>(1, options_.staging_bytes / bytes);
    const ElementRange values = file.values(range);
    if (values.count == 0) return;
    const int64_t first = file.offsets[static_cast<size_t>(range.param)];
    std::optional<WriteBuffer::Copy> weight;
    if (file.model >= 0 && range.weight.file >= 0)
        weight = {layout_.files[static_cast<size_t>(file.model + range.weight.file)].name, range.weight.offset,
                  access_.dtypes.weight, range.weight_add};
    buffer_.begin(file.state->file, first + values.begin * bytes, weight);
    for (int64_t done = 0; done < values.count; done += step) {
        const int64_t count = std::min(step, values.count - done);
        access_.read(file.state->kind, range.param, values.begin + done, count, buffer_.room(count * bytes));
        buffer_.filled(count * bytes);
    }
}
