#include "llmc/train/run/run_summary.h"

#include <algorithm>

#include "llmc/base/version.h"
#include "llmc/config/schedule.h"
#include "llmc/parallel/zero/sharded_state.h"

namespace {

constexpr size_t kLabel = 12;   // columns before the text
constexpr size_t kWidth = 118;

// "model       text", continued under the text; what does not fit into `most` lines becomes `rest`.
std::string entry(const std::string& label, const std::vector<std::string>& words, size_t most,
                  const std::string& rest = "...") {
    std::string text = label + std::string(kLabel - label.size(), ' ');
    size_t column = kLabel, lines = 1;
    for (const std::string& given : words) {
        const std::string word = shortened(escaped(given));   // a path may hold anything
        const bool last_line = lines == most;
        const bool last_word = &given == &words.back();
        const size_t needed = column + word.size() + 1 + (last_line && !last_word ? rest.size() + 1 : 0);
        if (column > kLabel && needed > kWidth) {
            if (last_line) return text + rest + "\n";
            text.back() = '\n';
            text += std::string(kLabel, ' ');
            column = kLabel;
            lines++;
        }
        text += word + " ";
        column += word.size() + 1;
    }
    text.back() = '\n';
    return text;
}

std::vector<std::string> words_of(const std::string& text) {
    std::vector<std::string> words(1);
    for (char c : text) {
        if (c == ' ') words.emplace_back();
        else words.back() += c;
    }
    return words;
}

// 8,030,261,248
std::string grouped(int64_t count) {
    std::string digits = std::to_string(count);
    for (int64_t at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3)
        digits.insert(static_cast<size_t>(at), ",");
    return digits;
}

std::string model_text(const SummarizedRun& run) {
    const ModelConfig& shape = run.config.shape;
    const std::string model = run.config.load.empty() ? run.config.model : run.config.load;
    return strf("%s: %s parameters; %s, hidden size %lld, %lld/%lld heads, vocabulary %lld", model.c_str(),
                grouped(run.table.param_elems).c_str(), count_text(shape.num_layers, "layer").c_str(),
                ll(shape.hidden_size), ll(shape.num_attention_heads), ll(shape.num_query_groups), ll(shape.vocab_size));
}

std::string device_text(const SummarizedRun& run) {
    std::string text = run.device.name;
    if (run.world.ranks > 1) text = strf("%d x ", run.world.ranks) + text;
    const int64_t context = run.config.context_parallel;
    if (context > 1) text += strf(", context parallel %lld", ll(context));
    if (run.world.local_ranks < run.world.ranks) text += strf(", %d on this host", run.world.local_ranks);
    return text + "; commit " + kBuildCommit;
}

std::string precision_text(const SummarizedRun& run) {
    const Config& c = run.config;
    const bool rounded = c.grad_shard_dtype == Dtype::kBf16 && shards_grads(c, run.world.ranks);
    std::string text = strf("%s, %s gradients%s and %s moments", dtype_name(c.dtype), dtype_name(c.grad_dtype),
                            rounded ? ", their shards in bf16," : "", moment_dtype_name(c));
    text += run.fp8_plan.on() ? strf("; FP8 %s: ", run.fp8_plan.row().name) + fp8_linears_text(run.fp8_plan)
                              : "; no linear in FP8";
    if (c.fp8_attention) text += "; attention: QK^T of the forward in INT8, PV in E4M3";
    return switches_precision(c) ? text + "; " + bf16_steps_text(c) : text;
}

std::string batch_text(const SummarizedRun& run) {
    const Config& c = run.config;
    const int ranks = run.world.ranks;
    const int64_t accumulation = c.global_batch_size / (c.micro_batch_size * c.data_ranks(ranks));
    const std::string chunks = c.loss_chunk > 0 ? strf("; logits of %lld tokens at once", ll(c.loss_chunk)) : "";
    return strf("%s tokens per step = %s x %lld; %s of %lld on %s", grouped(c.global_batch_size * c.seq_length).c_str(),
                count_text(c.global_batch_size, "sequence").c_str(), ll(c.seq_length),
                count_text(accumulation, "gradient accumulation step").c_str(), ll(c.micro_batch_size),
                count_text(ranks, "rank").c_str()) + chunks;
}

std::string shards_text(const DataLoader& data) {
    return grouped(data.total_tokens()) + " tokens in "
           + count_text(static_cast<int64_t>(data.shards().size()), "shard");
}

std::string data_text(const SummarizedRun& run) {
    const Config& c = run.config;
    if (c.synthetic_data) return "synthetic tokens, for timing only";
    const double samples = static_cast<double>(samples_after(c, c.train_iters));
    const double epochs = samples / static_cast<double>(run.train.samples_per_epoch());
    return shards_text(run.train) + strf(", %.3g epoch%s in this run", epochs, epochs == 1 ? "" : "s")
           + (run.valid ? "; validation " + shards_text(*run.valid) : "; no validation data");
}

std::string memory_text(const SummarizedRun& run) {
    return strf("%.3f GiB planned%s of %.1f GiB", gib(run.plan.arena_bytes),
                run.world.ranks > 1 ? " per rank" : "", gib(run.device.memory_bytes))
           + (run.plan.host_bytes() > 0 ? strf("; %.3f GiB pinned in host memory", gib(run.plan.host_bytes())) : "")
           + (run.device.sm == 0 && run.world.local_ranks > 1 ? ", which the ranks of a host share" : "");
}

std::string speed_text(const SummarizedRun& run) {
    const Config& c = run.config;
    const std::string steps = count_text(c.train_iters, "step");
    if (run.predicted_ms <= 0) return "not predicted for this device; " + steps;
    const double seconds = 1e-3 * run.predicted_ms;
    return strf("predicted %.4g s/it, %s tokens/s; %s in %.3g hours", seconds,
                grouped(static_cast<int64_t>(static_cast<double>(c.global_batch_size * c.seq_length) / seconds))
                    .c_str(), steps.c_str(), 1e-3 * run.all_steps_ms / 3600);
}

std::string saves_text(const Config& c) {
    std::string text = c.save.empty() ? "no checkpoint (--save DIR)" : c.save;
    if (!c.save.empty())
        text += c.save_interval > 0 ? strf(" every %s and at the end", count_text(c.save_interval, "step").c_str())
                                    : " at the end";
    return text + (c.log_file.empty() ? "; no log (--log-file FILE)" : "; log " + c.log_file);
}

}  // namespace

std::string summary_text(const SummarizedRun& run) {
    return entry("model", words_of(model_text(run)), 2) + entry("device", words_of(device_text(run)), 1)
           + entry("precision", words_of(precision_text(run)), 3, "... (the log has all)")
           + entry("batch", words_of(batch_text(run)), 1) + entry("data", words_of(data_text(run)), 2)
           + entry("memory", words_of(memory_text(run)), 1) + entry("speed", words_of(speed_text(run)), 1)
           + entry("saves", words_of(saves_text(run.config)), 2)
           + (run.changed.empty() ? "" : entry("options", run.changed, 5, "... (--print-config has all)"));
}

size_t notes_that_fit(const std::string& summary, size_t notes) {
    const auto lines = static_cast<size_t>(std::count(summary.begin(), summary.end(), '\n'));
    const size_t room = kStartLines - std::min(lines, kStartLines - 1);
    return notes <= room ? notes : room - 1;
}
