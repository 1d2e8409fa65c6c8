// Shared by the tests of config.json.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/checkpoint_test.h"

namespace checkpoint_test {

using Json = nlohmann::json;

// The error of reading `json` with one field set to `value` (or removed, if that is discarded).
inline std::string with(Json json, const std::string& pointer, const Json& value) {
    if (value.is_discarded())
        json.erase(pointer.substr(1));
    else json[Json::json_pointer(pointer)] = value;
    return error_of([&] { model_config_from_json(json.dump(), "DIR/config.json"); });
}

inline const Json kRemove(Json::value_t::discarded);

inline Json json_of(const std::string& name) {
    for (const NamedConfig& c : all_configs())
        if (name == c.name) return Json::parse(hf_config_json(c.config, Dtype::kFp32));
    FAIL("no configuration ", name);
    return {};
}

inline ModelConfig read_config(const Json& json) { return model_config_from_json(json.dump(), "x"); }

}  // namespace checkpoint_test
