#include "llmc/checkpoint/save_layout.h"

#include <algorithm>
#include <set>

namespace {

// Largest range of elements for one writer, if several ranks hold them.
constexpr int64_t kMaxRangeElems = int64_t{1} << 24;

// Assigns work to the rank that has the least so far, among those that can do it.
struct Balance {
    std::vector<int64_t> bytes;
    explicit Balance(size_t ranks) : bytes(ranks) {}

    int assign(int64_t more, const std::vector<int>& able) {
        const int rank = *std::min_element(able.begin(), able.end(), [&](int a, int b) { return of(a) < of(b); });
        of(rank) += more;
        return rank;
    }
    int64_t& of(int rank) { return bytes[static_cast<size_t>(rank)]; }
};

// The tensors of the model that are not transposed, by parameter, with their places.
struct PlacedTensor {
    int64_t begin, count;   // elements of the parameter
    FilePlace place;
};
using PlacedTensors = std::vector<std::vector<PlacedTensor>>;

// Adds the ranges of one parameter, split where a rank's range or a tensor of the model begins or ends, each with one
// of its holders as writer. An element has state_bytes, written_bytes in all models and weight_bytes in one.
void add_ranges(const ParamTable& table, int param, const HeldByRank& held, const std::vector<PlacedTensor>& tensors,
                int64_t state_bytes, int64_t written_bytes, int64_t weight_bytes, Balance& balance,
                std::vector<SavedRange>& ranges) {
    const Param& p = table.params[static_cast<size_t>(param)];
    std::set<int64_t> cuts{p.elems()};
    for (int64_t at = 0; at < p.elems(); at += kMaxRangeElems) cuts.insert(at);
    for (const PlacedTensor& tensor : tensors) cuts.insert({tensor.begin, tensor.begin + tensor.count});
    for (const auto& by_param : held)
        for (const ElementRange& part : by_param[static_cast<size_t>(param)]) {
            CHECK(part.begin >= 0 && part.count >= 0 && part.begin + part.count <= p.elems(),
                  "a rank holds elements outside of %s", p.name.c_str());
            cuts.insert({part.begin, part.begin + part.count});
        }
    for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) {
        const int64_t begin = *cut, end = *std::next(cut);
        std::vector<int> holders;
        for (size_t rank = 0; rank < held.size(); rank++)
            for (const ElementRange& part : held[rank][static_cast<size_t>(param)])
                if (part.begin <= begin && end <= part.begin + part.count) holders.push_back(static_cast<int>(rank));
        CHECK(!holders.empty(), "no rank holds elements %lld to %lld of %s", ll(begin), ll(end), p.name.c_str());
        SavedRange range{.param = param, .begin = begin, .count = end - begin,
                         .weight_add = p.minus_one ? -1.0f : 0.0f};
        for (const PlacedTensor& tensor : tensors)
            if (tensor.begin <= begin && end <= tensor.begin + tensor.count)
                range.weight = {tensor.place.file, tensor.place.offset + (begin - tensor.begin) * weight_bytes};
        range.rank = balance.assign(range.count * (state_bytes + (range.weight.file < 0 ? 0 : written_bytes)), holders);
        ranges.push_back(range);
    }
}

SavedFile file_of(const std::string& name, const std::vector<SafetensorsEntry>& entries) {
    SavedFile file{name, safetensors_header(entries), 0};
    file.bytes = static_cast<int64_t>(file.header.size());
    for (const SafetensorsEntry& entry : entries) file.bytes += entry.bytes();
    return file;
}

}  // namespace

std::vector<SafetensorsEntry> state_entries(const ParamTable& table, const OptimizerState& state,
                                            const StateDtypes& dtypes) {
    std::vector<SafetensorsEntry> entries;
    for (const Param& param : table.params) {
        if (!param.has(state.kind)) continue;
        std::vector<int64_t> shape{param.rows, param.cols};
        if (param.is_vector()) shape.pop_back();
        if (state.block > 1 || state.by_row) shape = {param.values(state, param.elems())};
        entries.push_back({param.name, dtypes.of(state.kind), shape});
    }
    return entries;
}

int64_t SaveLayout::models() const {
    return std::count_if(state_files.begin(), state_files.end(), [](const StateFile& file) { return file.model >= 0; });
}

int64_t SaveLayout::bytes() const {
    int64_t total = models() * static_cast<int64_t>(index_json.size());
    for (const SavedFile& file : files) total += file.bytes;
    return total;
}

int64_t SaveLayout::buffer_bytes(int rank) const {
    int64_t total = 0;
    auto add = [&](int writer, int64_t bytes) { total += writer == rank ? WriteBuffer::aligned(bytes) : 0; };
    for (const SavedFile& file : files) add(0, static_cast<int64_t>(file.header.size()));
    for (const SavedRange& range : ranges)
        for (const StateFile& file : state_files)
            if (file.has(range.param)) add(range.rank, file.values(range).count * file.value_bytes);
    return total;
}

HeldByRank held_whole(const ParamTable& table, int ranks) {
    std::vector<std::vector<ElementRange>> all;
    for (const Param& param : table.params) all.push_back({{0, param.elems()}});
    return HeldByRank(static_cast<size_t>(ranks), all);
}

SaveLayout make_save_layout(const ParamTable& table, const StateDtypes& dtypes, const HeldByRank& held,
                            int64_t max_part_bytes) {
    SaveLayout layout;
    Balance balance(held.size());
    const auto parts = split_parts(hf_tensors(table, dtypes.weight), max_part_bytes);
    PlacedTensors placed(table.params.size());
    std::vector<TransposedTensor> transposed;   // of the model
    for (size_t i = 0; i < parts.size(); i++) {
        layout.files.push_back(file_of(part_file_name(i, parts.size()), entries_of(parts[i])));
        FilePlace place{static_cast<int>(i), static_cast<int64_t>(layout.files.back().header.size())};
        for (const HfTensor& tensor : parts[i]) {
            const int64_t cols = table.params[static_cast<size_t>(tensor.param)].cols;
            if (tensor.part.transposed) transposed.push_back({tensor, 0, place});
            else placed[static_cast<size_t>(tensor.param)].push_back({tensor.part.row_begin * cols,
                                                                      tensor.part.rows * cols, place});
            place.offset += tensor.entry.bytes();
        }
    }
    if (parts.size() > 1) layout.index_json = part_index_json(parts);

    const int own_files = static_cast<int>(parts.size());
    if (table.params[0].has(StateKind::kEma))
        for (int i = 0; i < own_files; i++) {
            SavedFile file = layout.files[static_cast<size_t>(i)];
            file.name = state_row(StateKind::kEma).model + file.name;
            layout.files.push_back(std::move(file));
        }
    for (const OptimizerState& state : kOptimizerStates) {
        const auto entries = state_entries(table, state, dtypes);
        if (entries.empty()) continue;
        layout.files.push_back(file_of(state.file, entries));
        int64_t offset = static_cast<int64_t>(layout.files.back().header.size());
        layout.state_files.push_back({.state = &state, .value_bytes = dtype_bytes(dtypes.of(state.kind)),
                                      .offsets = {}, .blocks = {}});
        StateFile& file = layout.state_files.back();
        if (state.model) {
            file.model = state.kind == StateKind::kMaster ? 0 : own_files;
            for (TransposedTensor saved : transposed) {
                saved.place.file += file.model;
                saved.state = static_cast<int>(layout.state_files.size()) - 1;
                layout.transposed.push_back(saved);
            }
        }
        for (const Param& param : table.params) {
            file.blocks.push_back(param.block_of(state));
            file.offsets.push_back(param.has(state.kind) ? offset : -1);
            if (param.has(state.kind)) offset += param.values(state, param.elems()) * file.value_bytes;
        }
    }
    for (size_t p = 0; p < table.params.size(); p++) {
        int64_t state_bytes = 0, weight_bytes = 0;   // of an element
        for (const StateFile& file : layout.state_files) {
            if (file.has(static_cast<int>(p))) state_bytes += file.value_bytes / file.blocks[p];
            if (file.model >= 0) weight_bytes += dtype_bytes(dtypes.weight);
        }
        add_ranges(table, static_cast<int>(p), held, placed[p], state_bytes, weight_bytes, dtype_bytes(dtypes.weight),
                   balance, layout.ranges);
    }

    // Any rank can write a transposed tensor: those that write less of the rest get more of them.
    std::vector<int> everyone;
    for (size_t rank = 0; rank < held.size(); rank++) everyone.push_back(static_cast<int>(rank));
    for (TransposedTensor& saved : layout.transposed) saved.rank = balance.assign(saved.tensor.entry.bytes(), everyone);
    return layout;
}
