#include "llmc/data/dataloader.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "llmc/base/dtype.h"
#include "llmc/base/rng.h"
#include "llmc/data/shard_meta.h"

namespace {

// Returns the file name without its directory. JSON is UTF-8 but a name may have any bytes, so those above ASCII become
// %XX.
std::string printable_name(const std::string& path) {
    std::string name;
    for (char c : path.substr(path.find_last_of('/') + 1))
        name += static_cast<unsigned char>(c) < 0x80 ? std::string(1, c)
                                                     : strf("%%%02X", static_cast<unsigned char>(c));
    return name;
}

std::string hex64(uint64_t value) { return strf("%016llx", (unsigned long long)value); }

void check_config(const DataConfig& config) {
    CHECK(!config.synthetic || config.globs.empty(), "synthetic tokens together with shards");
    REQUIRE(config.synthetic || !config.globs.empty(), "no data: name token shards with --train-data");
    REQUIRE(config.seq_length >= 1, "sequence length %lld, must be at least 1", (long long)config.seq_length);
    REQUIRE(config.vocab_size >= 1 && config.vocab_size <= std::numeric_limits<int32_t>::max(),
            "vocabulary size %lld, must be in [1, 2^31)", (long long)config.vocab_size);
    const std::string& dtype = config.token_dtype;
    REQUIRE(dtype.empty() || dtype == "uint16" || dtype == "uint32",
            "--token-dtype '%s', must be uint16 or uint32", dtype.c_str());
}

// The fingerprint of synthetic data. Other versions draw other tokens.
constexpr int kSyntheticVersion = 1;

// Converts a random number to a token. Token k has a probability of about 1 / (k + 1), like words in text, so that the
// embedding's backward pass adds many rows of the same token. The octave of k + 1 is uniform, and so is k within it;
// tokens beyond the vocabulary wrap around.
int32_t synthetic_token(uint32_t random, int64_t vocab_size) {
    const uint64_t octaves = std::bit_width(static_cast<uint64_t>(vocab_size));
    const uint64_t scaled = random * octaves;
    const uint64_t low = uint64_t{1} << (scaled >> 32);
    const uint64_t offset = (scaled & 0xffffffffu) * low >> 32;
    return static_cast<int32_t>((low + offset - 1) % static_cast<uint64_t>(vocab_size));
}

// Draws tokens 0..seq_length of a sample; the last one is only a target.
void draw_sample(const DataConfig& config, int64_t sample, int32_t* inputs, int32_t* targets) {
    const uint64_t key = rng_key(config.seed, "synthetic data");
    for (int64_t t = 0; t <= config.seq_length; t += 4) {
        const Philox4 random = philox(key, static_cast<uint64_t>(t), static_cast<uint64_t>(sample));
        for (int64_t i = t; i < std::min(t + 4, config.seq_length + 1); i++) {
            const int32_t token = synthetic_token(random.word[i - t], config.vocab_size);
            if (i < config.seq_length) inputs[i] = token;
            if (i > 0) targets[i - 1] = token;
        }
    }
}

// One row of fingerprint_json.
struct SavedShard {
    std::string name, fingerprint;
    int64_t tokens, token_bytes;
};

// Explains the first position i at which the names of the two lists differ.
std::string describe_misplaced(const std::vector<SavedShard>& saved, const std::vector<ShardInfo>& now, size_t i) {
    auto was_saved = [&](const std::string& path) {
        return std::any_of(saved.begin(), saved.end(),
                           [&](const SavedShard& row) { return row.name == printable_name(path); });
    };
    auto is_here = [&](const std::string& name) {
        return std::any_of(now.begin(), now.end(),
                           [&](const ShardInfo& info) { return printable_name(info.path) == name; });
    };
    if (i >= now.size() || (i < saved.size() && !is_here(saved[i].name)))
        return strf("data shard '%s' of the checkpoint is missing", saved[i].name.c_str());
    const char* how = i < saved.size() && was_saved(now[i].path) ? "reordered" : "new";
    return strf("data shard '%s' (number %zu) is %s since the checkpoint", now[i].path.c_str(), i, how);
}

// Explains a difference in versions of synthetic data; 0 means shards.
std::string describe_synthetic(int was, int now) {
    if (was > 0 && now > 0) return strf("the checkpoint's synthetic tokens are of version %d, this executable draws "
                                        "version %d", was, now);
    return was > 0 ? "the checkpoint's data is synthetic (--synthetic-data), this run has shards"
                   : "the checkpoint's data is shards, this run has synthetic data (--synthetic-data)";
}

// Weights as stored in a checkpoint: parts and number of shards of each source; null without weights.
nlohmann::json blend_json(const std::vector<SourceInfo>& sources) {
    nlohmann::json rows;
    if (sources.size() > 1)
        for (const SourceInfo& source : sources) rows.push_back({source.parts, source.shards});
    return rows;
}

std::string describe_parts(const nlohmann::json& rows) {
    if (rows.is_null()) return "no weights";
    std::string parts, shards;
    for (const nlohmann::json& row : rows) {
        parts += (parts.empty() ? "" : " : ") + std::to_string(row.at(0).get<int64_t>());
        shards += (shards.empty() ? "" : ", ") + std::to_string(row.at(1).get<int64_t>());
    }
    return parts + " of " + shards + " shards";
}

std::string join_names(const std::vector<std::string>& globs) {
    return globs.size() == 1 ? globs[0] : strf("%s and %zu more", globs[0].c_str(), globs.size() - 1);
}

}  // namespace

DataLoader::Location DataLoader::locate(int64_t sample) const {
    const BlendOrder::Place place = order_.at(sample);
    const size_t source = static_cast<size_t>(place.source);
    const int64_t n = sources_[source].samples;
    int64_t index = place.index % n;
    if (config_.shuffle) index = permuted_index(index, n, seed_of(place.source), place.index / n);
    index += first_of_source_[source];
    auto after = std::upper_bound(first_sample_.begin(), first_sample_.end(), index);
    size_t s = static_cast<size_t>(after - first_sample_.begin()) - 1;
    index -= first_sample_[s];
    if (packings_[s]) return {&shards_[s], &masks_[s], packings_[s]->sample(index)};
    return {&shards_[s], &masks_[s], {{index * config_.seq_length, config_.seq_length + 1}}};
}

void DataLoader::read_mask(ShardInfo& info) {
    masks_.push_back(LossMask::of_shard(info.path, info.tokens));
    info.masked = masks_.back().has_value();
    info.counted = info.masked ? masks_.back()->counted() : info.tokens;
    if (info.masked) info.fingerprint = rng_key(info.fingerprint ^ masks_.back()->fingerprint(), "loss mask");
}

void DataLoader::divide(Shard& shard) {
    ShardInfo& info = shard.info;
    const bool index = info.format == ShardFormat::kMegatron;
    const int64_t separator = info.tokenizer.separator;
    const bool known = index || (separator >= 0 && separator < config_.vocab_size);
    const bool align = config_.align.value_or(info.masked && known);
    if (config_.documents || align) shard.find_documents(index ? -1 : read_separator(info.path, config_.vocab_size));
    REQUIRE(info.tokens > (align ? 1 : config_.seq_length), "data shard '%s': %s %s fewer than one sample (sequence "
            "length %lld + 1); remove the shard or lower --seq-length", info.path.c_str(),
            count_text(info.tokens, "token").c_str(), info.tokens == 1 ? "is" : "are", ll(config_.seq_length));
    info.samples = (info.tokens - 1) / config_.seq_length;
    packings_.emplace_back();
    if (!align) return;
    const std::vector<int64_t> starts = document_starts(shard);
    info.samples = packings_.back().emplace(starts, info.tokens, config_.seq_length, packed_).samples();
    info.fingerprint = rng_key(info.fingerprint, {reinterpret_cast<const char*>(starts.data()), 8 * starts.size()});
}

// Sources of equal size must have different orders.
uint64_t DataLoader::seed_of(int64_t source) const {
    return source == 0 ? config_.seed : rng_key(config_.seed, "source " + std::to_string(source));
}

// Sets sources_, except their numbers of samples, and returns the paths of all shards.
std::vector<std::string> DataLoader::find_shards() {
    const DataWords words = parse_data_words(config_.globs);
    REQUIRE(words.error.empty(), "data: %s", words.error.c_str());
    std::vector<int64_t> parts;
    std::vector<std::string> globs;
    for (const DataSource& source : words.sources) {
        parts.push_back(source.parts);
        globs.insert(globs.end(), source.globs.begin(), source.globs.end());
    }
    order_ = BlendOrder(parts);
    std::vector<size_t> matches;
    std::vector<std::string> paths = expand_globs(globs, &matches);
    auto found = matches.begin();
    for (const DataSource& source : words.sources) {
        SourceInfo info{.name = join_names(source.globs), .weight = source.weight, .parts = source.parts};
        info.share = static_cast<double>(source.parts) / static_cast<double>(order_.period());
        for (size_t i = 0; i < source.globs.size(); i++) info.shards += static_cast<int64_t>(*found++);
        sources_.push_back(info);
    }
    return paths;
}

DataLoader::DataLoader(const DataConfig& config) : config_(config) {
    check_config(config);
    if (config.synthetic) {
        first_sample_.push_back(std::numeric_limits<int64_t>::max());
        return;
    }
    for (const std::string& path : find_shards()) {
        Shard shard(path, config.token_dtype);
        ShardInfo& info = shard.info;
        read_mask(info);
        info.tokenizer = read_tokenizer(path);
        divide(shard);
        total_tokens_ += info.tokens;
        first_sample_.push_back(first_sample_.back() + info.samples);
        require_same_tokenizer("mixed shards", infos_, {info});
        infos_.push_back(info);
        shards_.push_back(std::move(shard));
    }
    size_t next = 0;
    for (SourceInfo& source : sources_) {
        for (int64_t i = 0; i < source.shards; i++) source.samples += infos_[next++].samples;
        first_of_source_.push_back(first_of_source_.back() + source.samples);
    }
    if (config.check_ids) check_token_ids(shards_, config.vocab_size);
    // prefetch() requests the pages; the kernel's read-ahead helps only if shards are read in order.
    for (const Shard& shard : shards_)
        shard.advise(0, shard.info.tokens, config.shuffle ? POSIX_FADV_RANDOM : POSIX_FADV_SEQUENTIAL);
}

int64_t DataLoader::read(int64_t sample, int32_t* inputs, int32_t* targets, uint8_t* starts) const {
    const int64_t T = config_.seq_length;
    if (config_.synthetic) {
        CHECK(sample >= 0, "sample %lld", (long long)sample);
        if (starts) std::fill_n(starts, T, 0);
        draw_sample(config_, sample, inputs, targets);
        return T;
    }
    const Location at = locate(sample);
    int64_t t = 0;   // tokens of the sample so far
    for (const TokenRange& range : at.ranges) {
        // Token 0 of a sample is no target, and token T no input.
        const int64_t n_inputs = std::min(range.count, T - t), skipped = t == 0, n = range.count - skipped;
        at.shard->copy(range.first, n_inputs, inputs + t);
        if (starts) at.shard->mark_starts(range.first, n_inputs, inputs + t, starts + t);
        int32_t* const to = targets + t + skipped - 1;
        at.shard->copy(range.first + skipped, n, to);
        if (*at.mask) (*at.mask)->apply(range.first + skipped, n, to);
        t += range.count;
    }
    std::fill(targets + t - 1, targets + T, kIgnoreIndex);
    const ShardInfo& info = at.shard->info;
    const int32_t separator = info.tokenizer.separator;
    // The separator that ends the last document counts, unless the document may go on in another shard.
    const bool ends = !info.masked && info.format != ShardFormat::kMegatron
                      && at.ranges.back().first + at.ranges.back().count < info.tokens;
    if (t <= T && ends) targets[t - 1] = separator;
    t = std::min(t, T);
    // Padding: documents of one token each.
    std::fill(inputs + t, inputs + T, separator < config_.vocab_size ? std::max(0, separator) : 0);
    if (starts) std::fill(starts + t, starts + T, 1);
    return T - std::count(targets, targets + T, kIgnoreIndex);
}

void DataLoader::prefetch(int64_t first, int64_t count) const {
    for (int64_t i = 0; i < count && !config_.synthetic; i++) {
        const Location at = locate(first + i);
        for (const TokenRange& range : at.ranges) at.shard->advise(range.first, range.count, POSIX_FADV_WILLNEED);
    }
}

std::string DataLoader::fingerprint_json() const {
    if (config_.synthetic) return nlohmann::json{{"synthetic", kSyntheticVersion}}.dump(1);
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const ShardInfo& info : infos_)
        list.push_back({{"name", printable_name(info.path)}, {"tokens", info.tokens}, {"token_bytes", info.token_bytes},
                        {"masked", info.masked}, {"fingerprint", hex64(info.fingerprint)}});
    nlohmann::ordered_json all{{"shards", list}};
    const nlohmann::json blend = blend_json(sources_);
    if (!blend.is_null()) all["blend"] = blend;
    if (const std::string known = facts_of(infos_).vocabulary; !known.empty()) all["vocabulary"] = known;
    return all.dump(1);
}

std::string DataLoader::check_fingerprint(const std::string& text) const {
    std::vector<SavedShard> saved;
    std::string reweighted;   // reported only if the shards have not changed
    try {
        const nlohmann::json parsed = nlohmann::json::parse(text);
        const int was = parsed.value("synthetic", 0), now = config_.synthetic ? kSyntheticVersion : 0;
        if (was != now) return describe_synthetic(was, now);
        if (now > 0) return "";
        for (const nlohmann::json& row : parsed.at("shards"))
            saved.push_back({.name = row.at("name").get<std::string>(),
                             .fingerprint = row.at("fingerprint").get<std::string>(),
                             .tokens = row.at("tokens").get<int64_t>(),
                             .token_bytes = row.at("token_bytes").get<int64_t>()});
        const nlohmann::json blend = blend_json(sources_), then = parsed.value("blend", nlohmann::json());
        if (then != blend)
            reweighted = strf("the weights of the data were %s in the checkpoint, %s now", describe_parts(then).c_str(),
                              describe_parts(blend).c_str());
    } catch (const nlohmann::json::exception&) {
        return "the checkpoint's list of data shards is not readable";
    }
    const std::vector<ShardInfo>& now = infos_;
    for (size_t i = 0; i < std::max(saved.size(), now.size()); i++) {
        if (i >= saved.size() || i >= now.size() || printable_name(now[i].path) != saved[i].name)
            return describe_misplaced(saved, now, i);
        const char* path = now[i].path.c_str();
        if (now[i].tokens != saved[i].tokens || now[i].token_bytes != saved[i].token_bytes)
            return strf("data shard '%s' changed since the checkpoint: %s of %d bytes, was %lld of %lld", path,
                        count_text(now[i].tokens, "token").c_str(), now[i].token_bytes, (long long)saved[i].tokens,
                        (long long)saved[i].token_bytes);
        if (hex64(now[i].fingerprint) != saved[i].fingerprint)
            return strf("data shard '%s' changed since the checkpoint: fingerprint %s, was %s", path,
                        hex64(now[i].fingerprint).c_str(), saved[i].fingerprint.c_str());
    }
    return reweighted;
}

std::string DataLoader::identity_json() const {
    std::string text = config_.synthetic ? fingerprint_json() : blend_json(sources_).dump();
    nlohmann::ordered_json identity{{"fingerprint", ""}, {"tokens", total_tokens()}};
    for (const ShardInfo& info : infos_) {
        text += ' ' + hex64(info.fingerprint);
        if (!info.tokenizer.name.empty()) identity["tokenizer"] = info.tokenizer.name;
        if (!info.tokenizer.sha256.empty()) identity["tokenizer_sha256"] = info.tokenizer.sha256;
    }
    identity["fingerprint"] = xxh3_of_text(text).substr(0, 16);
    return identity.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::vector<std::string> describe_data(const DataLoader& loader, int64_t samples) {
    std::vector<std::string> lines;
    const std::vector<SourceInfo>& sources = loader.sources();
    for (size_t k = 0; k < sources.size() && sources.size() > 1; k++) {
        const double reads = static_cast<double>(loader.samples_of(static_cast<int64_t>(k), samples))
                             / static_cast<double>(sources[k].samples);
        lines.push_back(strf("%.4g %% of the samples from %s: %s, %s, each read %.3g times", 100 * sources[k].share,
                             sources[k].name.c_str(), count_text(sources[k].shards, "shard").c_str(),
                             count_text(sources[k].samples, "sample").c_str(), reads));
    }
    const auto percent = [](int64_t a, int64_t b) { return 100 * static_cast<double>(a) / static_cast<double>(b); };
    int64_t masks = 0, tokens = 0, counted = 0;
    for (const ShardInfo& info : loader.shards()) {
        masks += info.masked;
        tokens += info.tokens;
        counted += info.counted;
    }
    if (masks > 0)
        lines.push_back(strf("loss masks of %lld of %s: %lld of %s count as targets, %.3g %%", (long long)masks,
                             count_text(static_cast<int64_t>(loader.shards().size()), "shard").c_str(),
                             (long long)counted, count_text(tokens, "token").c_str(), percent(counted, tokens)));
    const PackingCounts& packed = loader.packed();
    if (packed.shards > 0)
        lines.push_back(strf("samples begin at documents: %s in %s, %.2g %% padding; %lld longer "
                             "than a sample are cut, their later parts have %.2g %% of the tokens",
                             count_text(packed.documents, "document").c_str(),
                             count_text(packed.samples, "sample").c_str(),
                             percent(packed.padding, packed.samples * loader.seq_length()), ll(packed.cut),
                             percent(packed.cut_tokens, packed.tokens)));
    if (masks > packed.shards)
        lines.push_back(strf("samples of %s with loss masks begin anywhere in a document%s",
                             count_text(masks - packed.shards, "shard").c_str(), loader.may_align() ? ", because the "
                             ".meta.json names no tokenizer.separator" : " (--align-documents off)"));
    return lines;
}

std::string reading_error(const std::function<void()>& read) {
    try {
        read();
    } catch (const Error& error) {
        if (error.exit_code != kExitBadInput) throw;
        return error.what();
    }
    return "";
}

void require_samples(const DataLoader& loader, int64_t needed, const char* what) {
    const std::vector<SourceInfo>& sources = loader.sources();
    for (size_t k = 0; k < sources.size() && sources.size() > 1; k++) {
        const int64_t share = loader.samples_of(static_cast<int64_t>(k), needed);
        REQUIRE(sources[k].samples >= share, "data '%s' has %s of %lld; needs %lld, its share of %lld (%s): "
                "lower its weight %s", sources[k].name.c_str(), count_text(sources[k].samples, "sample").c_str(),
                (long long)loader.seq_length(), (long long)share, (long long)needed, what, sources[k].weight.c_str());
    }
    if (sources.size() > 1) return;
    if (loader.samples_per_epoch() >= needed) return;
    const std::vector<ShardInfo>& shards = loader.shards();
    std::string name = strf("'%s'", shards[0].path.c_str());
    if (shards.size() > 1) name += strf(" and %zu more", shards.size() - 1);
    FAIL(kExitBadInput, "data %s has %s = %s of %lld; needs %lld (%s): lower that to %lld, or add shards", name.c_str(),
         count_text(loader.total_tokens(), "token").c_str(), count_text(loader.samples_per_epoch(), "sample").c_str(),
         (long long)loader.seq_length(), (long long)needed, what, (long long)loader.samples_per_epoch());
}

void mark_documents(const uint8_t* starts, int64_t B, int64_t T, int32_t* out) {
    for (int64_t b = 0; b < B; b++, starts += T) {
        int32_t *first = out + b * T, *ends = out + (B + b) * T;
        for (int64_t start = 0, t = 0; t < T; t++) {
            first[t] = static_cast<int32_t>(start);
            if (t + 1 < T && !starts[t + 1]) continue;
            std::fill(ends + start, ends + t + 1, static_cast<int32_t>(t + 1));
            start = t + 1;
        }
    }
}

void restart_positions(const uint8_t* starts, int64_t B, int64_t T, int32_t* out) {
    for (int64_t i = 0; i < B * T; i++) out[i] = i % T == 0 || starts[i] ? 0 : out[i - 1] + 1;
}

// A balanced Feistel network over the next even number of bits, applied until the result is below n (cycle walking).
// The network is a bijection for any round function, and cycle walking restricts it to [0, n). The domain is smaller
// than 4 n, so fewer than 4 iterations are expected.
int64_t permuted_index(int64_t index, int64_t n, uint64_t seed, int64_t epoch) {
    constexpr int kRounds = 8;
    CHECK(n >= 1 && index >= 0 && index < n && epoch >= 0, "index %lld of %lld, epoch %lld", (long long)index,
          (long long)n, (long long)epoch);
    if (n == 1) return 0;
    const int half_bits = (static_cast<int>(std::bit_width(static_cast<uint64_t>(n - 1))) + 1) / 2;
    const uint64_t mask = (uint64_t{1} << half_bits) - 1;
    const uint64_t key = rng_key(seed, "shuffle");
    uint64_t x = static_cast<uint64_t>(index);
    do {
        uint64_t left = x >> half_bits, right = x & mask;
        for (int round = 0; round < kRounds; round++) {
            const uint64_t counter = right | static_cast<uint64_t>(round) << 32;
            left ^= philox(key, counter, static_cast<uint64_t>(epoch)).word[0] & mask;
            std::swap(left, right);
        }
        x = left << half_bits | right;
    } while (x >= static_cast<uint64_t>(n));
    return static_cast<int64_t>(x);
}

// Counting sort: stable, and its cost does not depend on the tokens.
void sort_rows_by_token(const int32_t* tokens, int64_t n, int64_t vocab_size, int32_t* order,
                        std::vector<int64_t>& scratch) {
    CHECK(n >= 0 && n <= std::numeric_limits<int32_t>::max() && vocab_size >= 1, "%lld rows, vocabulary %lld",
          (long long)n, (long long)vocab_size);
    auto bucket = [&](int32_t token) {
        return static_cast<size_t>(token >= 0 && token < vocab_size ? token : vocab_size);
    };
    // scratch[b + 1] counts bucket b; after the prefix sums scratch[b] is the position of the next row of bucket b.
    scratch.assign(static_cast<size_t>(vocab_size) + 2, 0);
    for (int64_t i = 0; i < n; i++) scratch[bucket(tokens[i]) + 1]++;
    std::partial_sum(scratch.begin(), scratch.end(), scratch.begin());
    for (int64_t i = 0; i < n; i++) order[scratch[bucket(tokens[i])]++] = static_cast<int32_t>(i);
}
