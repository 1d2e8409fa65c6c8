// JSON that other programs or people wrote: --config files, config.json, sidecars.
#pragma once
#include <nlohmann/json.hpp>
#include <string>

// Parses `text`, the content of `file`. Comments are allowed, and so is a byte order mark. Anything but one JSON object
// is an error with exit code 2, in one line without the library's words: the file, the place and what to change.
// `filter` is the library's callback.
nlohmann::json parse_json_object(const std::string& text, const std::string& file,
                                 const nlohmann::json::parser_callback_t& filter = nullptr);
