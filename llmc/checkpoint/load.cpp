#include "llmc/checkpoint/load.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "llmc/base/json_object.h"
#include "llmc/checkpoint/checkpoint_dir.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/huggingface/hf_tensors.h"
#include "llmc/checkpoint/rank_outcome.h"
#include "llmc/checkpoint/save_layout.h"

namespace {

// Requires that a tensor exists with this shape and one of these dtypes, and returns its view.
const SafetensorsView& expect(const SafetensorsView* view, const std::string& file,
                              const SafetensorsEntry& wanted, std::initializer_list<const char*> dtypes) {
    REQUIRE(view, "%s: tensor %s is missing", file.c_str(), wanted.name.c_str());
    REQUIRE(view->shape == wanted.shape, "%s: tensor %s has shape %s, the model needs %s", file.c_str(),
            wanted.name.c_str(), shape_text(view->shape).c_str(), shape_text(wanted.shape).c_str());
    REQUIRE(std::find(dtypes.begin(), dtypes.end(), view->dtype) != dtypes.end(), "%s: tensor %s is %s, needed is %s",
            file.c_str(), wanted.name.c_str(), view->dtype.c_str(),
            list_text({dtypes.begin(), dtypes.end()}, ", ").c_str());
    return *view;
}

// The part of range `all` of a parameter whose values of a state this rank reads.
std::vector<ElementRange> read_parts(const OptimizerState& state, const StateAccess& access, int index,
                                     const ElementRange& all) {
    return state.by_row ? std::vector<ElementRange>{all} : held_within(access, index, all);
}

// Loads this rank's elements of every tensor in a state's file. saved: the table of the run that saved it; what only
// its optimizer keeps is checked, but not read.
void load_state(const std::string& path, const ParamTable& table, const ParamTable& saved, const OptimizerState& state,
                const StateAccess& access, std::vector<float>& staging) {
    const auto entries = state_entries(saved, state, access.dtypes);
    if (entries.empty()) return;
    const Dtype dtype = access.dtypes.of(state.kind);
    const int64_t step = static_cast<int64_t>(staging.size()) * 4 / dtype_bytes(dtype);
    const SafetensorsReader reader(path);
    for (const auto& [name, view] : reader.tensors()) {
        const int index = saved.find(name);
        REQUIRE(index >= 0 && saved.params[static_cast<size_t>(index)].has(state.kind),
                "%s: tensor %s is not a parameter of this model", path.c_str(), name.c_str());
    }
    for (const SafetensorsEntry& entry : entries) {
        auto found = reader.tensors().find(entry.name);
        const SafetensorsView* place = found == reader.tensors().end() ? nullptr : &found->second;
        const SafetensorsView& view = expect(place, path, entry, {safetensors_dtype(dtype)});
        const int index = table.find(entry.name);
        const Param& param = table.params[static_cast<size_t>(index)];
        if (!param.has(state.kind)) continue;
        for (const ElementRange& part : read_parts(state, access, index, {0, param.elems()})) {
            const int64_t end = param.values(state, part.begin + part.count);
            for (int64_t begin = param.values(state, part.begin); begin < end; begin += step) {
                const int64_t count = std::min(step, end - begin);
                view.read(begin * dtype_bytes(dtype), count * dtype_bytes(dtype), staging.data());
                access.write(state.kind, index, begin, count, staging.data());
            }
        }
    }
}

// Zeroes this rank's elements of a range of a state.
void write_zeros(const ParamTable& table, StateKind kind, int index, const ElementRange& all,
                 const StateAccess& access, std::vector<float>& staging) {
    const Param& param = table.params[static_cast<size_t>(index)];
    const OptimizerState& state = state_row(kind);
    const int64_t step = static_cast<int64_t>(staging.size());
    std::fill(staging.begin(), staging.end(), 0.0f);
    for (const ElementRange& part : read_parts(state, access, index, all)) {
        const int64_t end = param.values(state, part.begin + part.count);
        for (int64_t begin = param.values(state, part.begin); begin < end; begin += step)
            access.write(kind, index, begin, std::min(step, end - begin), staging.data());
    }
}

// Zeroes a state of the parameters that did not have it in the run that saved it, and returns their number.
int64_t zero_new_states(const ParamTable& table, const ParamTable& saved, const OptimizerState& state,
                        const StateAccess& access, std::vector<float>& staging) {
    int64_t count = 0;
    for (size_t p = 0; p < table.params.size(); p++) {
        if (!table.params[p].has(state.kind) || saved.params[p].has(state.kind)) continue;
        write_zeros(table, state.kind, static_cast<int>(p), {0, table.params[p].elems()}, access, staging);
        count++;
    }
    return count;
}

// Tensors that some versions of transformers stored although they are no parameters: causal masks and rope
// frequencies.
bool is_buffer(const std::string& name) {
    return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias")
           || name.ends_with(".rotary_emb.inv_freq");
}

// Finds a tensor by name; GPT-2's files on the hub have names without the prefix, and transformers 5 names Mixtral's
// router as the others.
const HfModelFiles::Found* find_tensor(const HfModelFiles& files, const std::string& name) {
    static const std::string kPrefix = "transformer.";
    auto found = files.tensors().find(name);
    if (found == files.tensors().end() && name.rfind(kPrefix, 0) == 0)
        found = files.tensors().find(name.substr(kPrefix.size()));
    const size_t mixtral = name.find(".block_sparse_moe.gate.");
    if (found == files.tensors().end() && mixtral != std::string::npos)
        found = files.tensors().find(std::string(name).replace(mixtral, 18, ".mlp."));
    return found == files.tensors().end() ? nullptr : &found->second;
}

// Whether two tensors are equal in this rank's share of their blocks: the ranks of a host together compare all blocks.
bool same_bytes(const SafetensorsView& a, const SafetensorsView& b, const World& world) {
    constexpr int64_t kBlock = int64_t{1} << 20;
    std::vector<char> of_a(static_cast<size_t>(std::min(kBlock, a.bytes))), of_b(of_a.size());
    for (int64_t done = world.local_rank * kBlock; done < a.bytes; done += world.local_ranks * kBlock) {
        const int64_t n = std::min(kBlock, a.bytes - done);
        a.read(done, n, of_a.data());
        b.read(done, n, of_b.data());
        if (std::memcmp(of_a.data(), of_b.data(), static_cast<size_t>(n)) != 0) return false;
    }
    return true;
}

// A tied head that is stored as well must equal the embedding.
void check_tied_head(const HfModelFiles& files, const SafetensorsView& head, const SafetensorsEntry& embedding,
                     const World& world) {
    const HfModelFiles::Found* found = find_tensor(files, embedding.name);
    CHECK(found, "%s was read before", embedding.name.c_str());
    const SafetensorsView& wte = *found->view;
    const bool same = head.dtype == wte.dtype && head.shape == wte.shape && same_bytes(head, wte, world);
    REQUIRE(same, "%s: tensor lm_head.weight differs from %s, but config.json ties them: set \"tie_word_embeddings\" "
            "there to false, or remove the tensor", files.directory().c_str(), embedding.name.c_str());
}

// Requires the same model, not only the same shapes: rope base, epsilon and so on. hf_config_json writes both
// sides again, so that differences in form between versions do not matter.
void check_same_model(const std::string& path, const ModelConfig& config) {
    ModelConfig saved = model_config_from_hf(path);
    saved.init_std = config.init_std;
    if (config.position == PositionEmbedding::kRope) saved.max_positions = config.max_positions;
    const auto ours = nlohmann::json::parse(hf_config_json(config, Dtype::kFp32));
    const auto theirs = nlohmann::json::parse(hf_config_json(saved, Dtype::kFp32));
    for (const auto& [name, value] : ours.items())
        REQUIRE(theirs.contains(name) && theirs[name] == value, "%s/config.json: \"%s\" is %s, this run's model has %s",
                path.c_str(), name.c_str(), theirs.value(name, nlohmann::json()).dump().c_str(), value.dump().c_str());
}

// The tensors of a checkpoint's model. Their data is not read: it is the rounded masters.
void check_model_tensors(const std::string& path, const ParamTable& table, Dtype weight) {
    const HfModelFiles files(path);
    std::set<std::string> wanted;
    for (const HfTensor& tensor : hf_tensors(table, weight)) {
        auto found = files.tensors().find(tensor.entry.name);
        const bool there = found != files.tensors().end();
        expect(there ? found->second.view : nullptr, there ? found->second.file : path, tensor.entry,
               {safetensors_dtype(weight)});
        wanted.insert(tensor.entry.name);
    }
    for (const auto& [name, found] : files.tensors())
        REQUIRE(wanted.count(name), "%s: tensor %s is not a parameter of this model", found.file.c_str(), name.c_str());
}

void load_masters(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                  const StateAccess& access, const World& world, int64_t staging_bytes) {
    const HfModelFiles files(directory);
    std::vector<float> staging(static_cast<size_t>(load_staging_bytes(table, staging_bytes) / 4));
    std::set<const SafetensorsView*> used;
    const bool stacked = std::any_of(table.params.begin(), table.params.end(), [&](const Param& param) {
        return !param.hf_stacked.empty() && find_tensor(files, param.hf_stacked);
    });
    const auto tensors = hf_tensors(table, Dtype::kFp32, stacked);
    for (const HfTensor& tensor : tensors) {
        const HfModelFiles::Found* found = find_tensor(files, tensor.entry.name);
        if (const auto* blocks = find_tensor(files, tensor.entry.name + "_blocks"); !found && blocks) {
            const auto expect_part = [&](const char* suffix, bool of_blocks) -> const SafetensorsView& {
                const std::string name = tensor.entry.name + suffix;
                const HfModelFiles::Found* part = find_tensor(files, name);
                const SafetensorsEntry entry{.name = name, .shape = Mxfp4::shape(tensor, of_blocks)};
                return expect(part ? part->view : nullptr, part ? part->file : directory, entry, {"U8"});
            };
            const Mxfp4 view{expect_part("_blocks", true), expect_part("_scales", false)};
            import_mxfp4(table, tensor, view, access);
            used.insert({&view.blocks, &view.scales});
            continue;
        }
        const bool no_head = !found && tensor.param == table.head && !config.tied_head;
        REQUIRE(!no_head, "%s: tensor %s is missing: if the head is the embedding, set \"tie_word_embeddings\" in "
                "config.json to true", directory.c_str(), tensor.entry.name.c_str());
        const SafetensorsView& view = expect(found ? found->view : nullptr, found ? found->file : directory,
                                             tensor.entry, {"F32", "BF16", "F16"});
        import_tensor(table, tensor, view, access, staging);
        used.insert(&view);
    }
    for (const auto& [name, found] : files.tensors()) {
        if (used.count(found.view) || is_buffer(name)) continue;
        if (config.tied_head && name == "lm_head.weight") {
            check_tied_head(files, *found.view, tensors[0].entry, world);
            continue;
        }
        FAIL(kExitBadInput, "%s: tensor %s is not a parameter of this model", found.file.c_str(),
             printable(name).c_str());
    }
    for (size_t p = 0; p < table.params.size(); p++) {   // rows without a tensor: padding of the vocabulary
        const int64_t begin = hf_rows(table.params[p]) * table.params[p].cols;
        write_zeros(table, StateKind::kMaster, static_cast<int>(p), {begin, table.params[p].elems() - begin}, access,
                    staging);
    }
}

}  // namespace

int64_t load_staging_bytes(const ParamTable& table, int64_t staging_bytes) {
    int64_t most = staging_bytes;
    for (const Param& param : table.params)
        for (const HfPart& part : param.hf)
            if (part.transposed) most = std::max(most, least_import_bytes(param));
    return most;
}

ModelConfig model_config_from_hf(const std::string& directory) {
    require_undamaged(directory, "config.json");
    const std::string path = directory + "/config.json";
    const bool model = is_regular_file(path);
    const std::vector<int64_t> steps = model || !is_directory(directory) ? std::vector<int64_t>{}
                                                                         : checkpoint_steps(directory);
    REQUIRE(steps.empty(), "%s has no config.json, but checkpoints: name one of them, %s/%s is "
            "the newest", directory.c_str(), directory.c_str(), step_directory_name(steps.back()).c_str());
    REQUIRE(!is_regular_file(directory), "%s is a file: name the folder in which config.json and the weights are",
            directory.c_str());
    REQUIRE(model || is_directory(directory), "%s has no config.json: no such directory; name the folder of a model "
            "that is on this machine", directory.c_str());
    REQUIRE(model, "%s has no config.json: not a model in the format of transformers", directory.c_str());
    return model_config_from_json(read_text_file(path, kMaxConfigBytes), path);
}

bool has_ema(const std::string& path) { return is_regular_file(path + "/" + state_row(StateKind::kEma).file); }

std::string load_checkpoint(const std::string& path, const ModelConfig& config, const ParamTable& table,
                            const StateAccess& access, Comm& comm, int64_t staging_bytes, OptimizerKind of_layers) {
    const ParamTable saved = make_param_table(config, of_layers, has_ema(path), access.dtypes.moment == Dtype::kE4m3,
                                              is_regular_file(path + "/" + state_row(StateKind::kRowExpAvgSq).file));
    std::string zero;
    on_all_ranks(comm, path + " cannot be loaded", [&] {
        check_same_model(path, config);
        check_model_tensors(path, table, access.dtypes.weight);
        std::vector<float> staging(static_cast<size_t>(load_staging_bytes(table, staging_bytes) / 4));
        for (const OptimizerState& state : kOptimizerStates) {
            load_state(path + "/" + state.file, table, saved, state, access, staging);
            if (state.kind == StateKind::kEma) continue;   // without one it starts from the masters
            const int64_t count = zero_new_states(table, saved, state, access, staging);
            if (count > 0 && state.block == 1)
                zero += strf("%s%s of %lld matrices", zero.empty() ? "" : ", ", state.name, ll(count));
        }
    });
    return zero;
}

void load_hf_weights(const std::string& directory, const ModelConfig& config, const ParamTable& table,
                     const StateAccess& access, Comm& comm, int64_t staging_bytes) {
    require_undamaged(directory, "model", &comm);   // model*: the weights and their index
    on_all_ranks(comm, directory + " cannot be loaded",
                 [&] { load_masters(directory, config, table, access, comm.world(), staging_bytes); });
}

std::string hf_weights_fingerprint(const std::string& directory) {
    const HfModelFiles files(directory);
    Xxh3 hash;
    for (const auto& [name, found] : files.tensors()) {
        const std::string head = name + ' ' + found.view->dtype + shape_text(found.view->shape);
        std::string bytes(static_cast<size_t>(std::min<int64_t>(found.view->bytes, 4096)), '\0');
        found.view->read(0, static_cast<int64_t>(bytes.size()), bytes.data());
        hash.update(head.data(), static_cast<int64_t>(head.size()));
        hash.update(bytes.data(), static_cast<int64_t>(bytes.size()));
    }
    return hash.digest().substr(0, 16);
}
