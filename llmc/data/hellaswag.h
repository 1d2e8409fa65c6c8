// HellaSwag in llm.c's file format for multiple choice. The header is 256 int32: 20240522, version, number of examples,
// bytes of the longest example, zeros. Each example is a sequence of words:
//   the largest word (0xffff), bytes of the example, index of the example, label, number of completions,
//   number of context tokens, these tokens, and for each completion the number of its tokens and the tokens.
// Words are uint16 (version 1, as llm.c) or uint32 (version 2, an extension for large vocabularies).
// Source: karpathy/llm.c, dev/data/data_common.py.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

class Hellaswag {
public:
    // Reads and checks the whole file. Errors (exit 2) name file, byte and
    // value; a row with more than seq_length inputs and a token outside the vocabulary are errors.
    Hellaswag(const std::string& path, int64_t vocab_size, int64_t seq_length);

    int64_t examples() const { return static_cast<int64_t>(examples_.size()); }
    // A row is the context and one completion; the rows of an example are consecutive.
    int64_t rows() const { return static_cast<int64_t>(rows_.size()); }
    int64_t longest() const { return longest_; }   // number of inputs of the longest row
    const std::string& fingerprint() const { return fingerprint_; }   // of the whole file

    // Writes the inputs and targets (T each, at least longest()) of a row: targets are the tokens of the completion and
    // kIgnoreIndex elsewhere. Inputs after the row repeat it: a text of equal tokens would go to the same experts of a
    // mixture. Returns the number of tokens of the completion.
    int64_t read(int64_t row, int64_t T, int32_t* inputs, int32_t* targets) const;

    // Counts the examples whose correct completion has the lowest loss. losses: one per row. Of equal losses the first
    // counts as the lowest, as in llm.c; a loss that is not finite never counts as the lowest.
    int64_t correct(const std::vector<double>& losses) const;

private:
    struct Row {
        int64_t context, context_tokens, completion, completion_tokens;   // offsets in tokens_, and lengths
    };
    struct Example {
        int64_t first_row, completions, label;
    };
    template <typename Word> void parse(const std::string& path, const std::string& bytes);

    const int64_t vocab_size_, seq_length_;
    std::string fingerprint_;
    std::vector<int32_t> tokens_;
    std::vector<Row> rows_;
    std::vector<Example> examples_;
    int64_t longest_ = 0;
};
