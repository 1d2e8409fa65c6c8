#include "llmc/data/shards.h"

#include <fcntl.h>
#include <glob.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <set>

#include "llmc/base/system/threads.h"

static_assert(std::endian::native == std::endian::little, "shards are little-endian and read without swapping");

namespace {

constexpr uint32_t kMagicV1 = 20240520, kMagicV7 = 20240801;
constexpr int64_t kLlmcHeaderBytes = 256 * 4;
constexpr char kMegatronMagic[] = "MMIDIDX\0";  // 9 bytes with the terminating zero
constexpr int64_t kMegatronMagicBytes = sizeof(kMegatronMagic);
constexpr int64_t kMegatronHeaderBytes = kMegatronMagicBytes + 8 + 1 + 8 + 8;

// Magic numbers of other formats, which could be mistaken for headerless tokens.
struct ForeignMagic {
    const char* bytes;
    size_t length;
    const char* what;
};
constexpr ForeignMagic kForeign[] = {
    {"\x8a\xd8\x34\x01", 4, "an llm.c evaluation file (HellaSwag, MMLU), not a token shard"},
    {"BIN.TOK\n", 8, "an llmq token file"},
    {"LOSSMASK", 8, "a loss mask; name its .bin instead"},
    {"MMIDIDX\0\0", 9, "a Megatron index; name its .bin instead"},
    {"\x93NUMPY", 6, "a NumPy array file"},
    {"PAR1", 4, "a parquet file; tokenise it with data/prepare_text.py"},
    {"PK\x03\x04", 4, "a zip archive; unpack it"},
    {"\x1f\x8b\x08", 3, "a gzip file; unpack it, or if it holds text, tokenise it with data/prepare_text.py"},
    {"\x28\xb5\x2f\xfd", 4, "a zstd file; unpack it, or if it holds text, tokenise it with data/prepare_text.py"},
    {"%PDF-", 5, "a PDF; pdftotext makes text of it, and data/prepare_text.py shards of the text"},
};

// Other files of a shard, which a pattern like dir/* matches as well.
bool is_companion(const std::string& path) {
    return path.ends_with(".idx") || path.ends_with(".mask") || path.ends_with(".meta.json");
}

// What was probably meant by a pattern that matches no file.
std::string way_out(const std::string& pattern) {
    const auto has = [&](const char* characters) { return pattern.find_first_of(characters) != std::string::npos; };
    if (has("'\"")) return "the quotes are a part of it: leave the inner ones out";
    if (has(",")) return "patterns are separated by spaces, not by commas";
    if (has(" ")) return "every pattern is a separate word: put quotes around each, not around all";
    if (has("$")) return "a shell leaves a variable in single quotes as it is: use double quotes";
    return "data/prepare_text.py makes shards of text";
}

const char* megatron_dtype_name(int code) {
    constexpr const char* kNames[] = {"?",     "uint8",   "int8",    "int16", "int32",
                                      "int64", "float64", "float32", "uint16"};
    return code >= 1 && code <= 8 ? kNames[code] : "unknown";
}

// Returns the largest of n ids. The inner loop has a fixed length so that the compiler vectorises it at -O2.
template <typename T>
uint32_t max_id(const uint8_t* bytes, int64_t n) {
    constexpr int64_t kBlock = 1024;
    T best[kBlock] = {}, block[kBlock];
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        std::memcpy(block, bytes + i * sizeof(T), sizeof(block));
        for (int64_t j = 0; j < kBlock; j++)
            best[j] = std::max(best[j], block[j]);
    }
    T result = *std::max_element(best, best + kBlock);
    for (; i < n; i++)
        result = std::max(result, load<T>(bytes + i * sizeof(T)));
    return result;
}

constexpr int64_t kBlockBytes = int64_t{1} << 18;   // of one read, when a whole file is read: stays in the L2 cache

InputFile open_shard(const std::string& path) {
    REQUIRE(!is_directory(path), "data shard '%s': a folder: name the files in it, '%s/train*.bin' (and for "
            "--valid-data '%s/valid*.bin')", path.c_str(), path.c_str(), path.c_str());
    return InputFile(path, "data shard '" + path + "'");
}

// A list of numbers in a file, read front to back.
template <typename T>
class ListReader {
public:
    ListReader(const InputFile& file, int64_t offset, int64_t count) : file_(file), offset_(offset), left_(count) {}
    T next() {
        if (at_ == block_.size()) {
            block_.resize(static_cast<size_t>(std::min<int64_t>(left_, kBlockBytes / static_cast<int64_t>(sizeof(T)))));
            const int64_t bytes = static_cast<int64_t>(block_.size() * sizeof(T));
            file_.read(offset_, bytes, block_.data());
            offset_ += bytes;
            left_ -= static_cast<int64_t>(block_.size());
            at_ = 0;
        }
        return block_[at_++];
    }

private:
    const InputFile& file_;
    int64_t offset_, left_;
    std::vector<T> block_;
    size_t at_ = 0;
};

struct MegatronHeader {
    int token_bytes;
    int64_t sequences, documents;   // entries of the tables; a document is a number of sequences

    // The tables, in this order: lengths and byte offsets of sequences, first sequences of documents.
    int64_t lengths() const { return kMegatronHeaderBytes; }
    int64_t pointers() const { return lengths() + 4 * sequences; }
    int64_t document_table() const { return pointers() + 8 * sequences; }
};

// Checks the header of a Megatron index, and that its tables fill the rest of the file.
MegatronHeader read_megatron_header(const InputFile& index, const char* name) {
    const int64_t bytes = index.bytes();
    REQUIRE(bytes >= kMegatronHeaderBytes, "data index '%s': truncated in the header: it ends at byte %lld of %lld",
            name, ll(bytes), ll(kMegatronHeaderBytes));
    uint8_t p[kMegatronHeaderBytes];
    index.read(0, kMegatronHeaderBytes, p);
    REQUIRE(std::memcmp(p, kMegatronMagic, kMegatronMagicBytes) == 0, "data index '%s': byte 0: wrong magic, expected "
            "MMIDIDX (Megatron); if the .bin of this name is not Megatron's, move this file away", name);
    uint64_t version = load<uint64_t>(p + 9);
    REQUIRE(version == 1, "data index '%s': byte 9: version %llu, expected 1", name, (unsigned long long)version);
    int code = p[17];
    REQUIRE(code == 4 || code == 8, "data index '%s': byte 17: token type %d (%s), only 4 (int32) and 8 (uint16) are "
            "supported", name, code, megatron_dtype_name(code));
    uint64_t sequences = load<uint64_t>(p + 18), documents = load<uint64_t>(p + 26);
    uint64_t body = static_cast<uint64_t>(bytes - kMegatronHeaderBytes);
    // Divides instead of multiplying, because a product with counts from the file may overflow.
    bool fits = sequences <= body / 12 && documents <= (body - sequences * 12) / 8;
    REQUIRE(fits, "data index '%s': truncated: byte 18 says %llu sequences and byte 26 %llu document ends, the file "
            "ends at byte %lld", name, (unsigned long long)sequences, (unsigned long long)documents, ll(bytes));
    uint64_t rest = body - sequences * 12 - documents * 8;
    REQUIRE(rest == 0, "data index '%s': %llu bytes too many at byte %lld (multimodal indices are not supported)",
            name, (unsigned long long)rest, ll(bytes - static_cast<int64_t>(rest)));
    return {code == 8 ? 2 : 4, static_cast<int64_t>(sequences), static_cast<int64_t>(documents)};
}

// Whether the ids are the halves of wider ones: each second one is tiny (`most` or less), and of the others many are
// not.
template <typename T> bool are_halves(const std::vector<uint8_t>& head, T most) {
    const size_t pairs = head.size() / (2 * sizeof(T));
    size_t above = 0;
    for (size_t i = 0; i < pairs; i++) {
        const uint8_t* const pair = head.data() + 2 * i * sizeof(T);
        if (load<T>(pair + sizeof(T)) > most) return false;
        above += load<T>(pair) > most;
    }
    return pairs >= 16 && above >= pairs / 4;
}

// Refuses headerless tokens whose first bytes show that they are wider than `bytes`. The upper halves of 32-bit ids are
// small because vocabularies are.
void require_token_bytes(const std::string& path, const std::vector<uint8_t>& head, int bytes) {
    REQUIRE(!are_halves<uint32_t>(head, 0), "data shard '%s': --token-dtype uint%d would read every second id as 0: "
            "these are 64-bit ids; write them anew with numpy's astype('uint32')", path.c_str(), 8 * bytes);
    REQUIRE(bytes == 4 || !(are_halves<uint16_t>(head, 0) || are_halves<uint16_t>(head, 15)), "data shard '%s': "
            "--token-dtype uint16 would read every second id as 0 or so: these are 32-bit ids, --token-dtype uint32",
            path.c_str());
}

}  // namespace

Shard::Shard(const std::string& path, const std::string& token_dtype) : file_(open_shard(path)) {
    info.path = path;
    REQUIRE(file_.bytes() > 0, "data shard '%s': the file is empty", path.c_str());
    std::vector<uint8_t> head(static_cast<size_t>(std::min<int64_t>(4096, file_.bytes())));
    file_.read(0, static_cast<int64_t>(head.size()), head.data());
    uint32_t magic = head.size() >= 4 ? load<uint32_t>(head.data()) : 0;
    const std::string index_path = shard_stem(path) + ".idx";
    if (path.ends_with(".bin") && is_regular_file(index_path)) {
        parse_megatron_index(index_path);
    } else if (magic == kMagicV1 || magic == kMagicV7) {
        parse_llmc_header(head);
    } else {
        parse_raw(head, token_dtype);
    }
    info.fingerprint = compute_fingerprint();
}

void Shard::parse_llmc_header(const std::vector<uint8_t>& head) {
    const char* path = info.path.c_str();
    bool wide = load<uint32_t>(head.data()) == kMagicV7;
    info.format = wide ? ShardFormat::kLlmcV7 : ShardFormat::kLlmcV1;
    info.token_bytes = wide ? 4 : 2;
    data_offset_ = kLlmcHeaderBytes;
    REQUIRE(file_.bytes() >= kLlmcHeaderBytes, "data shard '%s': truncated in the header: it ends at byte %lld of %lld",
            path, ll(file_.bytes()), ll(kLlmcHeaderBytes));
    uint32_t version = load<uint32_t>(head.data() + 4), expected = wide ? 7 : 1;
    REQUIRE(version == expected, "data shard '%s': byte 4: version %u, expected %u after magic %u", path,
            version, expected, load<uint32_t>(head.data()));
    // llm.c writes the count as int32. It is read as unsigned and checked against the file size.
    info.tokens = load<uint32_t>(head.data() + 8);
    int64_t expected_bytes = kLlmcHeaderBytes + info.tokens * info.token_bytes;
    REQUIRE(file_.bytes() >= expected_bytes, "data shard '%s': truncated: the header (byte 8) says %lld tokens, that "
            "is %lld bytes, the file ends at byte %lld", path, ll(info.tokens), ll(expected_bytes), ll(file_.bytes()));
    REQUIRE(file_.bytes() == expected_bytes, "data shard '%s': the header (byte 8) says %lld tokens, which end at byte "
            "%lld, but the file has %lld bytes", path, ll(info.tokens), ll(expected_bytes), ll(file_.bytes()));
}

void Shard::parse_megatron_index(const std::string& index_path) {
    const char* name = index_path.c_str();
    const InputFile index(index_path, "data index '" + index_path + "'");
    const MegatronHeader header = read_megatron_header(index, name);
    info.format = ShardFormat::kMegatron;
    info.token_bytes = header.token_bytes;
    const int64_t lengths = header.lengths(), pointers = header.pointers();
    ListReader<int32_t> length_list(index, lengths, header.sequences);
    ListReader<int64_t> pointer_list(index, pointers, header.sequences);
    int64_t position = 0;  // cannot overflow: it is compared with the file size after every sequence
    for (int64_t s = 0; s < header.sequences; s++) {
        int32_t length = length_list.next();
        int64_t pointer = pointer_list.next();
        REQUIRE(length >= 0, "data index '%s': byte %lld: sequence %lld has length %d", name,
                ll(lengths + 4 * s), ll(s), length);
        REQUIRE(pointer == position, "data index '%s': byte %lld: sequence %lld starts at %lld, expected %lld; only "
                "sequences stored one after the other are read", name, ll(pointers + 8 * s), ll(s), ll(pointer),
                ll(position));
        position += static_cast<int64_t>(length) * info.token_bytes;
        REQUIRE(position <= file_.bytes(), "data shard '%s': truncated: sequence %lld of the index ends at byte %lld, "
                "the file at byte %lld", info.path.c_str(), ll(s), ll(position), ll(file_.bytes()));
    }
    REQUIRE(position == file_.bytes(), "data shard '%s': the sequences of the index end at byte %lld, but the file has "
            "%lld bytes", info.path.c_str(), ll(position), ll(file_.bytes()));
    info.tokens = position / info.token_bytes;
}

void Shard::find_documents(int32_t separator) {
    separator_ = separator;
    if (info.format != ShardFormat::kMegatron) return;
    const std::string name = shard_stem(info.path) + ".idx";
    const InputFile index(name, "data index '" + name + "'");
    const MegatronHeader header = read_megatron_header(index, name.c_str());
    ListReader<int64_t> documents(index, header.document_table(), header.documents);
    ListReader<int32_t> lengths(index, header.lengths(), header.sequences);
    int64_t sequence = 0, token = 0;   // the next sequence, and its first token
    for (int64_t d = 0; d < header.documents; d++) {
        const int64_t first = documents.next();
        REQUIRE(first >= sequence && first <= header.sequences && (d > 0 || first == 0), "data index '%s': byte %lld: "
                "document %lld begins with sequence %lld of %lld, the one before with %lld", name.c_str(),
                ll(header.document_table() + 8 * d), ll(d), ll(first), ll(header.sequences), ll(sequence));
        for (; sequence < first; sequence++) token += lengths.next();
        starts_.push_back(token);
    }
    REQUIRE(header.documents > 1 && sequence == header.sequences, "data index '%s': its %lld document ends do not "
            "cover its %lld sequences: make it anew, or take --align-documents off (--reset-attention-mask and "
            "--reset-position-ids need the documents, too)", name.c_str(), ll(header.documents), ll(header.sequences));
}

void Shard::mark_starts(int64_t first, int64_t count, const int32_t* ids, uint8_t* starts) const {
    std::transform(ids, ids + count, starts, [&](int32_t id) { return starts_.empty() && id == separator_; });
    for (auto at = std::lower_bound(starts_.begin(), starts_.end(), first); at < starts_.end() && *at < first + count;
         ++at)
        starts[*at - first] = 1;
}

void Shard::parse_raw(const std::vector<uint8_t>& head, const std::string& token_dtype) {
    const char* path = info.path.c_str();
    for (const ForeignMagic& foreign : kForeign) {
        bool match = head.size() >= foreign.length && std::memcmp(head.data(), foreign.bytes, foreign.length) == 0;
        REQUIRE(!match, "data shard '%s': byte 0: wrong magic: this is %s", path, foreign.what);
    }
    // Text has no control characters, unlike tokens, half of whose bytes are 0 if the ids are small.
    const bool text = std::all_of(head.begin(), head.end(),
                                  [](uint8_t c) { return c >= ' ' || (c >= '\t' && c <= '\r'); });
    REQUIRE(!text || (!token_dtype.empty() && head.size() < 256),   // few ids may look like text
            "data shard '%s': byte 0: wrong magic: this is text; data/prepare_text.py makes shards of it", path);
    uint32_t first = 0;
    std::memcpy(&first, head.data(), std::min<size_t>(4, head.size()));
    REQUIRE(!token_dtype.empty(), "data shard '%s': byte 0: wrong magic 0x%08x (known: llm.c %u and %u, or a Megatron "
            ".idx of the same name); if it is headerless (nanoGPT), pass --token-dtype uint16 or uint32", path, first,
            kMagicV1, kMagicV7);
    info.format = ShardFormat::kRaw;
    info.token_bytes = token_dtype == "uint32" ? 4 : 2;
    REQUIRE(file_.bytes() % info.token_bytes == 0, "data shard '%s': odd size: %lld bytes is not a multiple of the %d "
            "bytes of a %s token; truncated, or another --token-dtype", path, ll(file_.bytes()), info.token_bytes,
            token_dtype.c_str());
    require_token_bytes(info.path, head, info.token_bytes);
    info.tokens = file_.bytes() / info.token_bytes;
}

uint64_t Shard::compute_fingerprint() const {
    constexpr int64_t kEnd = 1 << 20, kBlock = 4096, kBlocks = 64;
    int64_t bytes = file_.bytes();
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    const auto hash = [&](int64_t begin, int64_t count) {
        file_.read_blocks(begin, count, kBlockBytes, [&](const uint8_t* data, int64_t n) {
            XXH3_64bits_update(&state, data, static_cast<size_t>(n));
        });
    };
    int64_t shape[4] = {bytes, data_offset_, info.token_bytes, info.tokens};
    XXH3_64bits_update(&state, shape, sizeof(shape));
    if (bytes <= 2 * kEnd + kBlock * kBlocks) {
        hash(0, bytes);
    } else {
        // Hashes both ends, where a rewritten or appended file differs, and evenly spaced blocks between them.
        hash(0, kEnd);
        hash(bytes - kEnd, kEnd);
        int64_t span = bytes - 2 * kEnd - kBlock;
        for (int64_t b = 0; b < kBlocks; b++) hash(kEnd + span / (kBlocks - 1) * b, kBlock);
    }
    return XXH3_64bits_digest(&state);
}

uint32_t Shard::token(int64_t index) const {
    uint32_t id = 0;   // little-endian
    file_.read(byte_offset(index), info.token_bytes, &id);
    return id;
}

void Shard::require_tokens(int64_t first, int64_t count) const {
    CHECK(first >= 0 && count >= 0 && count <= info.tokens - first, "tokens [%lld, +%lld) of %lld in '%s'",
          ll(first), ll(count), ll(info.tokens), info.path.c_str());
}

void Shard::copy(int64_t first, int64_t count, int32_t* out) const {
    require_tokens(first, count);
    if (info.token_bytes == 4) return file_.read(byte_offset(first), count * 4, out);
    constexpr int64_t kBlock = 16384;   // tokens
    uint16_t block[kBlock];
    for (int64_t done = 0; done < count; done += kBlock) {
        const int64_t n = std::min(kBlock, count - done);
        file_.read(byte_offset(first + done), 2 * n, block);
        std::copy(block, block + n, out + done);
    }
}

int64_t Shard::find_bad_id(int64_t first, int64_t count, int64_t vocab_size) const {
    require_tokens(first, count);
    if (info.token_bytes == 2 && vocab_size > 0xffff) return -1;
    const int64_t width = info.token_bytes;
    int64_t bad = -1, done = 0;   // done: tokens of the previous blocks
    file_.read_blocks(byte_offset(first), count * width, kBlockBytes, [&](const uint8_t* data, int64_t bytes) {
        const int64_t n = bytes / width;
        const uint32_t largest = width == 2 ? max_id<uint16_t>(data, n) : max_id<uint32_t>(data, n);
        for (int64_t i = 0; bad < 0 && largest >= vocab_size && i < n; i++)
            if ((width == 2 ? load<uint16_t>(data + 2 * i) : load<uint32_t>(data + 4 * i)) >= vocab_size)
                bad = first + done + i;
        done += n;
    });
    return bad;
}

void Shard::advise(int64_t first, int64_t count, int advice) const {
    file_.advise(byte_offset(first), count * info.token_bytes, advice);
}

std::vector<std::string> expand_globs(const std::vector<std::string>& globs, std::vector<size_t>* matches_of) {
    std::vector<std::string> paths;
    std::set<std::string> seen;
    for (const std::string& pattern : globs) {
        std::vector<std::string> matches;
        glob_t found = {};
        // An existing file is used as it is, even if its name contains pattern characters.
        if (is_regular_file(pattern)) {
            matches.push_back(pattern);
        } else if (glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &found) == 0) {
            for (size_t i = 0; i < found.gl_pathc; i++)
                if (!is_companion(found.gl_pathv[i])) matches.push_back(found.gl_pathv[i]);
        }
        globfree(&found);
        REQUIRE(!matches.empty(), "data pattern '%s' matches no file; %s", pattern.c_str(), way_out(pattern).c_str());
        std::sort(matches.begin(), matches.end());  // by byte, whatever the locale
        for (std::string& path : matches) {
            REQUIRE(seen.insert(path).second,
                    "data shard '%s' is matched by two patterns; every shard is read once", path.c_str());
            paths.push_back(std::move(path));
        }
        if (matches_of) matches_of->push_back(matches.size());
    }
    return paths;
}

void check_token_ids(const std::vector<Shard>& shards, int64_t vocab_size) {
    constexpr int64_t kChunk = int64_t{1} << 24;  // tokens that a thread checks at a time
    struct Chunk {
        size_t shard;
        int64_t first, count, bad = -1;   // bad: the first bad token
    };
    std::vector<Chunk> chunks;
    for (size_t s = 0; s < shards.size(); s++)
        for (int64_t at = 0; at < shards[s].info.tokens; at += kChunk)
            chunks.push_back({s, at, std::min(kChunk, shards[s].info.tokens - at)});

    // Threads take chunks in order, so all chunks before a bad one are taken when it is found. After all have ended,
    // the lowest bad chunk is the first one of the data, independent of timing.
    std::atomic<size_t> next{0};
    std::atomic<bool> stop{false};
    on_threads(std::min<size_t>(chunks.size(), 16), [&] {
        for (size_t c = next++; c < chunks.size() && !stop; c = next++) {
            Chunk& chunk = chunks[c];
            const Shard& shard = shards[chunk.shard];
            shard.advise(chunk.first, chunk.count, POSIX_FADV_SEQUENTIAL);
            chunk.bad = shard.find_bad_id(chunk.first, chunk.count, vocab_size);
            if (chunk.bad >= 0) stop = true;
        }
    });
    const auto bad = std::find_if(chunks.begin(), chunks.end(), [](const Chunk& chunk) { return chunk.bad >= 0; });
    if (bad == chunks.end()) return;
    const Shard& shard = shards[bad->shard];
    FAIL(kExitBadInput, "data shard '%s': byte %lld (token %lld): id %u is not below the vocabulary size %lld; the "
         "data was made with another tokenizer than the model's%s", shard.info.path.c_str(),
         ll(shard.byte_offset(bad->bad)), ll(bad->bad), shard.token(bad->bad), ll(vocab_size),
         shard.info.format == ShardFormat::kRaw ? ", or has another --token-dtype" : "");
}
