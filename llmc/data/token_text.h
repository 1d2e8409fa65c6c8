// Text of tokens, from the tokenizer.json of a Hugging Face byte-level BPE (GPT-2, Llama-3, Qwen): decoding only.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

class TokenText {
public:
    // Reads a tokenizer.json. Exit 2, with the reason, if it is not a byte-level BPE.
    explicit TokenText(const std::string& path);

    // Returns the text as bytes, because a token may end within a character. An id that the tokenizer does not have
    // becomes "<id>".
    std::string decode(const std::vector<int32_t>& tokens) const;

private:
    std::vector<std::string> bytes_;   // by id; empty: no such token
};

// The vocabulary of a tokenizer.json, to compare: CRC-32, in hexadecimal, of the tokens by id, each after its number of
// bytes (int32). Formatting, merges and settings do not change it. "" if the file has no tokens.
std::string vocabulary_of(const std::string& path);

// Returns `path` if it is a .json file, or the tokenizer.json in the folder `path`; "" if there is none.
std::string tokenizer_json(const std::string& path);
