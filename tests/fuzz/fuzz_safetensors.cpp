// Fuzzes the files of a model directory: any bytes as a safetensors file, as its header, or as config.json. Allowed
// outcomes are views that can be read to the last byte, a configuration that can be written again, or an Error with
// exit code 2. The first byte selects: a a file, b a header, c a configuration.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/checkpoint/huggingface/hf_config.h"
#include "llmc/checkpoint/huggingface/safetensors.h"
#include "llmc/model/parameters/params.h"

namespace {

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "fuzz_safetensors: %s\n", what);
    std::abort();
}

// Reads every byte of every view.
void read_everything(const std::map<std::string, SafetensorsView>& views) {
    unsigned sum = 0;
    std::vector<float> values;
    for (const auto& [name, view] : views) {
        std::string content(static_cast<size_t>(view.bytes), '\0');
        view.read(0, view.bytes, content.data());
        for (const char c : content) sum += static_cast<unsigned char>(c);
        values.resize(static_cast<size_t>(view.elems()));
        require(view.elems() <= view.bytes, "more elements than bytes");
        const bool is_float = view.dtype == "F32" || view.dtype == "F16" || view.dtype == "BF16";
        require(read_as_fp32(view, 0, view.elems(), values.data()) == is_float, "a dtype read as another");
    }
    volatile unsigned sink = sum;
    (void)sink;
}

void try_file(const std::string& bytes) {
    const Descriptor memory(memfd_create("fuzz", 0));
    require(write(memory.fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()), "no memory file");
    read_everything(SafetensorsReader("/proc/self/fd/" + std::to_string(memory.fd)).tensors());
}

void try_config(const std::string& text) {
    const ModelConfig config = model_config_from_json(text, "fuzz");
    require(model_config_errors(config).empty(), "an unsound configuration was let through");
    if (config.num_layers <= 8)
        require(make_param_table(config).param_elems > 0, "a model without parameters");
    const std::string written = hf_config_json(config, Dtype::kBf16);
    require(hf_config_json(model_config_from_json(written, "fuzz"), Dtype::kBf16) == written,
            "a configuration changed on its way out and in");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
    try {
        if (data[0] % 3 == 'a' % 3) try_file(rest);
        if (data[0] % 3 == 'b' % 3) {
            // The second byte is the number of data bytes, so that headers need no matching length to get
            // far.
            const uint64_t length = rest.size() - 1;
            try_file(std::string(reinterpret_cast<const char*>(&length), 8) + rest.substr(1)
                     + std::string(static_cast<unsigned char>(rest[0]), 'x'));
        }
        if (data[0] % 3 == 'c' % 3) try_config(rest);
    } catch (const Error& error) {
        require(error.exit_code == kExitBadInput && error.what()[0] != '\0', error.what());
        require(!std::strchr(error.what(), '\n'), "a message of several lines");
    }
    return 0;
}
