// Fuzzes the messages of the link between hosts. a: any bytes as the beginning of a frame; b: edits of frames that a
// host has sealed, which the other host opens in pieces of any size. Only unchanged frames, in their order, may be
// opened.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "llmc/base/check.h"
#include "llmc/fault/link_frames.h"

namespace {

void require(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "fuzz_link_frames: %s\n", what);
    std::abort();
}

void try_cut(const std::string& bytes) {
    // A heap block of exactly this size, so that the sanitizer detects reads past it.
    const auto block = std::make_unique<char[]>(bytes.size());
    std::memcpy(block.get(), bytes.data(), bytes.size());
    const std::string_view in(block.get(), bytes.size());
    for (const uint64_t most : {uint64_t{0}, uint64_t{68}, uint64_t{16} << 20, ~uint64_t{0}}) {
        Frame frame;
        if (cut_frame(in, most, &frame) != FrameCut::kWhole) continue;
        require(frame.bytes <= in.size() && frame.body.size() <= most, "a frame beyond its bounds");
        require(make_frame(frame.kind, frame.body) == in.substr(0, frame.bytes), "a frame that differs from its bytes");
        require(!FrameSeal("key").open(&frame), "a frame that nobody has sealed");
    }
}

// Edits of four bytes: place (2), kind, value.
void try_opening(const std::string& edits, size_t piece) {
    const LinkHandshake handshake("secret", 1, std::string(kNonceBytes, 'l'), std::string(kNonceBytes, 'c'));
    FrameSeal sealing = handshake.to_listener(), opening = handshake.to_listener();
    std::vector<std::string> sent = {"", "rows", std::string(100, 'r'), "report"};
    std::string stream;
    for (size_t i = 0; i < sent.size(); i++) stream += sealing.seal(static_cast<uint32_t>(i), sent[i]);
    const std::string whole = stream;
    for (size_t at = 0; at + 4 <= edits.size(); at += 4) {
        uint16_t place;
        std::memcpy(&place, edits.data() + at, 2);
        const size_t begin = place % (stream.size() + 1), count = static_cast<unsigned char>(edits[at + 3]);
        switch (edits[at + 2] % 4) {
            case 0: stream.replace(begin, 1, 1, edits[at + 3]); break;
            case 1: stream.erase(begin, count); break;
            case 2: stream.insert(begin, whole.substr(count % whole.size(), 64)); break;
            default: stream.insert(begin, 1, edits[at + 3]);
        }
    }
    std::string in;
    size_t opened = 0;
    for (size_t at = 0; at < stream.size(); at += piece) {
        in += stream.substr(at, piece);
        Frame frame;
        FrameCut cut;
        while ((cut = cut_frame(in, 1024, &frame)) == FrameCut::kWhole) {
            if (!opening.open(&frame)) return;
            require(opened < sent.size() && frame.kind == opened && frame.body == sent[opened],
                    "a frame that was not sent, or not then");
            opened++;
            in.erase(0, frame.bytes);
        }
        if (cut == FrameCut::kBroken) return;
    }
    require(stream != whole || opened == sent.size(), "a frame that was sent is missing");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
    try {
        if (data[0] % 2 == 'a' % 2) try_cut(rest);
        else try_opening(rest.substr(1), 1 + static_cast<unsigned char>(rest[0]));
    } catch (const Error& error) {
        require(false, error.what());
    }
    return 0;
}
