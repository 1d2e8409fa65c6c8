#include "llmc/checkpoint/load.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/base/check.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/hf_config.h"
#include "llmc/checkpoint/save_layout.h"

namespace {

// Requires that a tensor exists with this shape and one of these dtypes, and returns its view.
const SafetensorsView& expect(const SafetensorsView* view, const std::string& file,
                              const SafetensorsEntry& wanted, std::initializer_list<const char*> dtypes) {
    REQUIRE(view, "%s: tensor %s is missing", file.c_str(), wanted.name.c_str());
    REQUIRE(view->shape == wanted.shape, "%s: tensor %s has shape %s, the model needs %s", file.c_str(),
            wanted.name.c_str(), shape_text(view->shape).c_str(), shape_text(wanted.shape).c_str());
    std::string allowed;
    for (const char* dtype : dtypes) {
        if (view->dtype == dtype) return *view;
        allowed += (allowed.empty() ? "" : ", ") + std::string(dtype);
    }
    FAIL(kExitBadInput, "%s: tensor %s is %s, needed is %s", file.c_str(), wanted.name.c_str(),
         view->dtype.c_str(), allowed.c_str());
}

// Loads this rank's elements of every tensor in a slot's file.
void load_slot(const std::string& path, const ParamTable& table, const StateSlot& slot, const StateAccess& access,
               int64_t staging_bytes) {
    const auto entries = slot_entries(table, slot, access.dtypes);
    if (entries.empty()) return;
    const Dtype dtype = access.dtypes.of(slot.kind);
    const int64_t step = std::max<int64_t>(1, staging_bytes / dtype_bytes(dtype));
    const SafetensorsReader reader(path);
    for (const auto& [name, view] : reader.tensors()) {
        const int index = table.find(name);
        REQUIRE(index >= 0 && table.params[static_cast<size_t>(index)].has(slot.kind),
                "%s: tensor %s is no parameter of this model", path.c_str(), name.c_str());
    }
    std::vector<char> block;
    for (const SafetensorsEntry& entry : entries) {
        auto found = reader.tensors().find(entry.name);
        const SafetensorsView* place = found == reader.tensors().end() ? nullptr : &found->second;
        const SafetensorsView& view = expect(place, path, entry, {safetensors_dtype(dtype)});
        const int index = table.find(entry.name);
        const int64_t elems = table.params[static_cast<size_t>(index)].elems();
        for (const ElementRange& part : held_within(access, slot.kind, index, {0, elems}))
            for (int64_t done = 0; done < part.count; done += step) {
                const int64_t begin = part.begin + done, count = std::min(step, part.count - done);
                const int64_t bytes = count * dtype_bytes(dtype);
                block.resize(static_cast<size_t>(bytes));
                view.read(begin * dtype_bytes(dtype), bytes, block.data());
                access.write(slot.kind, index, begin, count, block.data());
            }
    }
}

// Sets rows of kWeight without a Hugging Face tensor to the rounded masters, as the optimizer does.
void load_padding(const SafetensorsView& master, const Param& param, int index, const StateAccess& access,
                  int64_t staging_bytes) {
    const int64_t step = std::max<int64_t>(1, staging_bytes / 4);
    for (int64_t begin = hf_rows(param) * param.cols; begin < param.elems(); begin += step) {
        const int64_t count = std::min(step, param.elems() - begin);
        std::vector<float> values(static_cast<size_t>(count));
        CHECK(read_as_fp32(master, begin, count, values.data()), "master of %s", param.name.c_str());
        std::vector<bf16> rounded(values.begin(), values.end());
        const void* data =
            access.dtypes.weight == Dtype::kFp32 ? static_cast<const void*>(values.data()) : rounded.data();
        access.write(StateKind::kWeight, index, begin, count, data);
    }
}

void zero_padding(const Param& param, int index, const StateAccess& access, int64_t staging_bytes) {
    const int64_t begin = hf_rows(param) * param.cols, padding = param.elems() - begin;
    const int64_t step = std::min(std::max<int64_t>(1, staging_bytes / 4), padding);
    const std::vector<float> zeros(static_cast<size_t>(step), 0.0f);
    for (const ElementRange& part : held_within(access, StateKind::kMaster, index, {begin, padding}))
        for (int64_t done = 0; done < part.count; done += step)
            access.write(StateKind::kMaster, index, part.begin + done, std::min(step, part.count - done), zeros.data());
}

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Tensors that some versions of transformers stored although they are no parameters: causal masks and rope
// frequencies.
bool is_buffer(const std::string& name) {
    return ends_with(name, ".attn.bias") || ends_with(name, ".attn.masked_bias")
           || ends_with(name, ".rotary_emb.inv_freq");
}

// Finds a tensor by name; GPT-2's files on the hub have names without the prefix.
const HfModelFiles::Found* find_tensor(const HfModelFiles& files, const std::string& name) {
    static const std::string kPrefix = "transformer.";
    auto found = files.tensors().find(name);
    if (found == files.tensors().end() && name.rfind(kPrefix, 0) == 0)
        found = files.tensors().find(name.substr(kPrefix.size()));
    return found == files.tensors().end() ? nullptr : &found->second;
}

bool same_bytes(const SafetensorsView& a, const SafetensorsView& b) {
    constexpr int64_t kBlock = int64_t{1} << 20;
    std::vector<char> of_a(static_cast<size_t>(std::min(kBlock, a.bytes))), of_b(of_a.size());
    for (int64_t done = 0; done < a.bytes; done += kBlock) {
        const int64_t n = std::min(kBlock, a.bytes - done);
        a.read(done, n, of_a.data());
        b.read(done, n, of_b.data());
        if (std::memcmp(of_a.data(), of_b.data(), static_cast<size_t>(n)) != 0) return false;
    }
    return true;
}

// A tied head that is stored as well must equal the embedding.
void check_tied_head(const HfModelFiles& files, const SafetensorsView& head, const SafetensorsEntry& embedding) {
    const HfModelFiles::Found* found = find_tensor(files, embedding.name);
    CHECK(found, "%s was read before", embedding.name.c_str());
    const SafetensorsView& wte = *found->view;
    const bool same = head.dtype == wte.dtype && head.shape == wte.shape && same_bytes(head, wte);
    REQUIRE(same,
            "%s: tensor lm_head.weight differs from %s, but this model's head is tied; set "
            "--untie-embeddings-and-output-weights",
            files.directory().c_str(), embedding.name.c_str());
}

// Requires the same model, not only the same shapes: rope base, epsilon and so on. Both sides are written again by
// hf_config_json, so that the form in which an older version wrote them does not matter.
void check_same_model(const std::string& path, const ModelConfig& config) {
    ModelConfig saved = model_config_from_hf(path);
    saved.init_std = config.init_std;
    if (config.position == PositionEmbedding::kRope) saved.max_positions = config.max_positions;
    const auto ours = nlohmann::json::parse(hf_config_json(config, Dtype::kFp32));
    const auto theirs = nlohmann::json::parse(hf_config_json(saved, Dtype::kFp32));
    for (const auto& [name, value] : ours.items())
        REQUIRE(theirs.contains(name) && theirs[name] == value,
                "%s/config.json: \"%s\" is %s, this run's model has %s", path.c_str(), name.c_str(),
                theirs.value(name, nlohmann::json()).dump().c_str(), value.dump().c_str());
}

}  // namespace

void load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, int64_t staging_bytes) {
    check_same_model(path, config);
    const HfModelFiles files(path);
    const auto tensors = hf_tensors(table, access.dtypes.weight);
    std::set<std::string> wanted;
    for (const HfTensor& tensor : tensors) {
        auto found = files.tensors().find(tensor.entry.name);
        const bool there = found != files.tensors().end();
        const SafetensorsView& view =
            expect(there ? found->second.view : nullptr, there ? found->second.file : path, tensor.entry,
                   {safetensors_dtype(access.dtypes.weight)});
        import_tensor(table, tensor, view, StateKind::kWeight, access, staging_bytes);
        wanted.insert(tensor.entry.name);
    }
    for (const auto& [name, found] : files.tensors())
        REQUIRE(wanted.count(name), "%s: tensor %s is no parameter of this model", found.file.c_str(), name.c_str());
    for (const StateSlot& slot : kStateSlots)
        load_slot(path + "/" + slot.file, table, slot, access, staging_bytes);
    const SafetensorsReader masters(path + "/" + state_slot(StateKind::kMaster).file);
    for (size_t p = 0; p < table.params.size(); p++)
        load_padding(masters.tensor(table.params[p].name), table.params[p], static_cast<int>(p), access, staging_bytes);
}

void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, Comm& comm, int64_t staging_bytes) {
    require_undamaged(directory, "model", &comm);   // model*: the weights and their index
    const HfModelFiles files(directory);
    std::set<const SafetensorsView*> used;
    const auto tensors = hf_tensors(table, Dtype::kFp32);
    for (const HfTensor& tensor : tensors) {
        const HfModelFiles::Found* found = find_tensor(files, tensor.entry.name);
        const bool no_head = !found && tensor.param == table.head && !config.tied_head;
        REQUIRE(!no_head,
                "%s: tensor %s is missing: the head there is tied; leave out "
                "--untie-embeddings-and-output-weights",
                directory.c_str(), tensor.entry.name.c_str());
        const SafetensorsView& view = expect(found ? found->view : nullptr, found ? found->file : directory,
                                             tensor.entry, {"F32", "BF16", "F16"});
        import_tensor(table, tensor, view, StateKind::kMaster, access, staging_bytes);
        used.insert(&view);
    }
    for (const auto& [name, found] : files.tensors()) {
        if (used.count(found.view) || is_buffer(name)) continue;
        if (config.tied_head && name == "lm_head.weight") {
            check_tied_head(files, *found.view, tensors[0].entry);
            continue;
        }
        FAIL(kExitBadInput, "%s: tensor %s is no parameter of this model", found.file.c_str(),
             printable(name).c_str());
    }
    for (size_t p = 0; p < table.params.size(); p++)
        zero_padding(table.params[p], static_cast<int>(p), access, staging_bytes);
}
