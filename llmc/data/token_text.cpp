#include "llmc/data/token_text.h"

#include <algorithm>
#include <map>

#include "llmc/base/check.h"
#include "llmc/base/json_object.h"
#include "llmc/base/system/files.h"

namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxId = 1 << 24;

// The bytes of byte-level BPE's characters. GPT-2 writes printable bytes as themselves and the others, in order, as the
// characters from 256 on.
std::map<uint32_t, char> byte_characters() {
    std::map<uint32_t, char> bytes;
    uint32_t next = 256;
    for (uint32_t byte = 0; byte < 256; byte++) {
        const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte != 173);
        bytes[printable ? byte : next++] = static_cast<char>(byte);
    }
    return bytes;
}

// The bytes of a token of the vocabulary. Byte-level BPE's characters have at most two UTF-8 bytes; any other character
// remains as it is.
std::string bytes_of(const std::string& token) {
    static const std::map<uint32_t, char> bytes = byte_characters();
    std::string text;
    for (size_t i = 0; i < token.size(); i++) {
        const auto lead = static_cast<unsigned char>(token[i]);
        const bool two = (lead & 0xe0) == 0xc0 && i + 1 < token.size();
        const uint32_t second = two ? static_cast<unsigned char>(token[i + 1]) & 0x3fu : 0;
        const uint32_t character = two ? (lead & 0x1fu) << 6 | second : lead;
        const auto found = lead < 0x80 || two ? bytes.find(character) : bytes.end();
        if (found != bytes.end()) text += found->second;
        else text.append(token, i, two ? 2 : 1);
        i += two;
    }
    return text;
}

// Whether a decoder or pre-tokenizer, or one of a sequence of them, is ByteLevel.
bool is_byte_level(const Json& step) {
    if (!step.is_object()) return false;
    if (step.value("type", Json()) == "ByteLevel") return true;
    for (const char* list : {"decoders", "pretokenizers"})
        if (const auto steps = step.find(list); steps != step.end() && steps->is_array())
            for (const Json& one : *steps)
                if (is_byte_level(one)) return true;
    return false;
}

// zlib's CRC-32 of more bytes.
uint32_t crc32(uint32_t crc, const std::string& bytes) {
    crc = ~crc;
    for (const char c : bytes) {
        crc ^= static_cast<unsigned char>(c);
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
}

Json vocabulary_in(const Json& root) {
    const Json model = root.value("model", Json());
    return model.is_object() ? model.value("vocab", Json()) : Json();
}

// Calls use(text, id, added) for the tokens of the vocabulary, which in a unigram model are a list of [token, score],
// and for the added ones.
template <typename Use> void each_token(const Json& root, const Use& use) {
    const Json vocabulary = vocabulary_in(root);
    for (size_t i = 0; vocabulary.is_array() && i < vocabulary.size(); i++)
        if (vocabulary[i].is_array() && !vocabulary[i].empty() && vocabulary[i][0].is_string())
            use(vocabulary[i][0].get<std::string>(), Json(i), false);
    if (vocabulary.is_object())
        for (const auto& [token, id] : vocabulary.items()) use(token, id, false);
    for (const Json& added : root.value("added_tokens", Json::array()))
        if (added.is_object() && added.contains("content") && added["content"].is_string())
            use(added["content"].get<std::string>(), added.value("id", Json()), true);
}

}  // namespace

TokenText::TokenText(const std::string& path) {
    const Json root = read_json_object(path, kMaxTokenizerBytes);
    REQUIRE(vocabulary_in(root).is_object() && is_byte_level(root.value("decoder", Json())),
            "tokenizer %s: not a tokenizer.json of a byte-level BPE", path.c_str());
    each_token(root, [&](const std::string& token, const Json& id, bool added) {
        const std::string text = added ? token : bytes_of(token);
        REQUIRE(id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < kMaxId,
                "tokenizer %s: token \"%s\" has the id %s", path.c_str(), printable(text).c_str(), id.dump().c_str());
        const auto index = id.get<size_t>();
        if (bytes_.size() <= index) bytes_.resize(index + 1);
        bytes_[index] = text;
    });
}

std::string TokenText::decode(const std::vector<int32_t>& tokens) const {
    std::string text;
    for (int32_t token : tokens) {
        const bool known = token >= 0 && static_cast<size_t>(token) < bytes_.size();
        const std::string* bytes = known ? &bytes_[static_cast<size_t>(token)] : nullptr;
        text += bytes && !bytes->empty() ? *bytes : strf("<%d>", token);
    }
    return text;
}

std::string vocabulary_of(const std::string& path) {
    std::vector<std::string> tokens;   // by id
    try {
        each_token(read_json_object(path, kMaxTokenizerBytes), [&](const std::string& token, const Json& id, bool) {
            if (!id.is_number_unsigned() || id >= kMaxId) return;
            tokens.resize(std::max(tokens.size(), id.get<size_t>() + 1));
            tokens[id.get<size_t>()] = token;
        });
    } catch (const Error&) {
        // It is copied all the same.
    }
    uint32_t crc = 0;
    for (const std::string& token : tokens) {
        const auto bytes = static_cast<int32_t>(token.size());
        crc = crc32(crc, std::string(reinterpret_cast<const char*>(&bytes), sizeof bytes) + token);
    }
    return tokens.empty() ? "" : strf("%08x", crc);
}

std::string tokenizer_json(const std::string& path) {
    if (path.empty()) return "";
    if (is_regular_file(path)) return path.ends_with(".json") ? path : "";
    const std::string inside = path + "/tokenizer.json";
    return is_regular_file(inside) ? inside : "";
}
