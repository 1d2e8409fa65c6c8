// HellaSwag on disk, in llm.c's format for multiple choice. 256 int32 of header: 20240522, version, number of examples,
// bytes of the longest example, zeros. Then examples, each a stream of words:
//   the largest word (0xffff), bytes of the example, its number from 0, label, completions,
//   tokens of the context, those tokens, and for each completion its tokens' number and the tokens.
// Words are uint16 (version 1, llm.c's only one) or uint32 (version 2, ours, for vocabularies that do not fit).
// Source: karpathy/llm.c, dev/data/data_common.py.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

class Hellaswag {
public:
    // Reads the first `examples` examples (0: all) and checks all of the file. Exit 2 with the file's name, the byte
    // and the value; also where a row has more than seq_length inputs, or a token lies outside the vocabulary.
    Hellaswag(const std::string& path, int64_t vocab_size, int64_t seq_length, int64_t examples);

    int64_t examples() const { return static_cast<int64_t>(examples_.size()); }
    // A row is the context and one completion; those of an example follow each other.
    int64_t rows() const { return static_cast<int64_t>(rows_.size()); }
    int64_t longest() const { return longest_; }   // inputs of the longest row
    const std::string& fingerprint() const { return fingerprint_; }   // of the whole file

    // Inputs and targets (T each, at least longest()) of a row: targets are the tokens of the completion where they are
    // predicted, kIgnoreIndex elsewhere. Returns how many.
    int64_t read(int64_t row, int64_t T, int32_t* inputs, int32_t* targets) const;

    // Examples whose right completion has the lowest of `losses`, one a row; the first of equal ones counts as the
    // lowest, as in llm.c, and one that is not finite never.
    int64_t correct(const std::vector<double>& losses) const;

private:
    struct Row {
        int64_t context, context_tokens, completion, completion_tokens;   // places in tokens_
    };
    struct Example {
        int64_t first_row, completions, label;
    };
    template <typename Word> void parse(const std::string& path, const std::string& bytes, int64_t limit);

    const int64_t vocab_size_, seq_length_;
    std::string fingerprint_;
    std::vector<int32_t> tokens_;
    std::vector<Row> rows_;
    std::vector<Example> examples_;
    int64_t longest_ = 0;
};
