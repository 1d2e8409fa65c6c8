// Text of tokens: the bytes of a byte-level BPE, added tokens, unknown ids, files that are refused.
#include "tests/support/data_test.h"

#include "llmc/data/token_text.h"

using data_test::TempDir;

namespace {

std::string file_with(const TempDir& dir, const std::string& text) {
    const std::string path = dir.path + "/tokenizer.json";
    std::ofstream(path) << text;
    return path;
}

}  // namespace

TEST_CASE("token text: characters of byte-level BPE are bytes again") {
    TempDir dir;
    // The characters of the bytes 0, 10, 32, 127, 160 and 173, and two that are themselves: 0xc3 0xa9 is an accented e.
    const std::string path = file_with(dir, R"({"model": {"type": "BPE", "vocab": {"a": 0, "\u0120the": 1, "\u00c3": 2,
        "\u00a9": 3, "\u010a": 4, "\u0100": 6, "\u0121": 7, "\u0142": 8, "\u0143": 9}},
        "added_tokens": [{"id": 11, "content": "<|end of text|>", "special": true}],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}})");
    const TokenText text(path);
    CHECK(text.decode({0, 1, 2, 3, 4}) == "a the\xc3\xa9\n");
    CHECK(text.decode({6, 7, 8, 9}) == std::string("\0\x7f\xa0\xad", 4));
    CHECK(text.decode({2}) == "\xc3");   // within a character
    CHECK(text.decode({11, 5, 12, -1}) == "<|end of text|><5><12><-1>");
    CHECK(tokenizer_json(path) == path);
    CHECK(tokenizer_json(path.substr(0, path.rfind('/'))) == path);
    CHECK(tokenizer_json(path + ".model") == "");
    CHECK(tokenizer_json("") == "");
}

TEST_CASE("token text: the vocabulary is known by its tokens, whatever the form of the file") {
    TempDir dir;
    const auto of = [&](const char* text) { return vocabulary_of(file_with(dir, text)); };
    // scripts/llmfp8/text_tokenizers.py has the same number for these tokens.
    const char* const known = "a23176d6";
    CHECK(of(R"({"model": {"vocab": {"a": 0, "\u0120b": 1, "\u00e9": 3}},
                "added_tokens": [{"id": 5, "content": "<s>"}]})") == known);
    CHECK(of(R"({"added_tokens": [{"content": "<s>", "id": 5}],
                "model": {"vocab": {"\u00e9": 3, "<s>": 5, "\u0120b": 1, "a": 0}, "merges": ["a b"]}})") == known);
    CHECK(of(R"({"model": {"vocab": [["a", -1.5], ["\u0120b", 0], ["", 0], ["\u00e9", -3], ["", 0], ["<s>", 0]]}})")
          == known);
    for (const char* other : {R"({"model": {"vocab": {"a": 0, "\u0120b": 1, "\u00e9": 3}}})",
                              R"({"model": {"vocab": {"a": 1, "\u0120b": 0, "\u00e9": 3, "<s>": 5}}})"})
        CHECK((of(other).size() == 8 && of(other) != known));
    for (const char* none : {"", "{}", "[]", R"({"model": 3})", R"({"model": {"vocab": [1, "a"]}})",
                             R"({"model": {"vocab": {"a": -1}}, "added_tokens": [{}]})"})
        CHECK(of(none).empty());
    CHECK(vocabulary_of(dir / "none").empty());
}

TEST_CASE("token text: other files are refused by name") {
    TempDir dir;
    for (const char* text : {"", "{", "[]", "{}", R"({"model": 3})", R"({"model": {"vocab": []}})",
                             R"({"model": {"vocab": {"a": 0}}})",
                             R"({"model": {"vocab": {"a": 0}}, "decoder": {"type": "Metaspace"}})",
                             R"({"model": {"vocab": {"a": -1}}, "decoder": {"type": "ByteLevel"}})",
                             R"({"model": {"vocab": {"a": "b"}}, "decoder": {"type": "ByteLevel"}})",
                             R"({"model": {"vocab": {"a": 99999999999}}, "decoder": {"type": "ByteLevel"}})"}) {
        CAPTURE(std::string(text));
        const std::string path = file_with(dir, text);
        CHECK(refusal_of([&] { TokenText refused(path); }).find(path + ": ") < 12);
    }
}
