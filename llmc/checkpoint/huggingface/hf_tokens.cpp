#include "llmc/checkpoint/huggingface/hf_tokens.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "llmc/base/json_object.h"
#include "llmc/base/system/files.h"
#include "llmc/checkpoint/manifest.h"

std::vector<int32_t> eos_token_ids(const std::string& directory) {
    std::vector<int32_t> ids;
    for (const char* file : {"generation_config.json", "config.json"}) {
        const std::string path = directory + "/" + file;
        if (!is_regular_file(path)) continue;
        require_undamaged(directory, file);
        const nlohmann::json object = read_json_object(path, kMaxConfigBytes);
        const JsonFields fields{object, path};
        if (!fields.has("eos_token_id")) continue;
        const bool list = object["eos_token_id"].is_array();
        for (int64_t id : list ? fields.integers("eos_token_id", 0, INT32_MAX)
                               : std::vector<int64_t>{fields.integer("eos_token_id", 0, INT32_MAX)})
            if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(static_cast<int32_t>(id));
        if (!ids.empty()) break;
    }
    return ids;
}
