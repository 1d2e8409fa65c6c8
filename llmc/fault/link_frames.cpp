#include "llmc/fault/link_frames.h"

#include <dlfcn.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#if LLMC_MPI
#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/opensslv.h>
#endif

#include "llmc/base/check.h"

namespace {

struct FrameHead {
    uint32_t magic, kind;
    uint64_t bytes;   // of the body
};
static_assert(sizeof(FrameHead) == kFrameHeadBytes);
constexpr uint32_t kMagic = 0x6c6d6638;

template <typename T> std::string_view bytes_of(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

#if LLMC_MPI
#define LLMC_TEXT_OF(number) #number
#define LLMC_LIBCRYPTO(major) "libcrypto.so." LLMC_TEXT_OF(major)
// Opened by the first handshake. Linking it would add 1.4 ms to the start of every process, also of runs on one host,
// which never need it.
struct Libcrypto {
    decltype(&::HMAC) hmac;
    decltype(&::EVP_sha256) sha256;
    decltype(&::CRYPTO_memcmp) compare;
};
const Libcrypto& libcrypto() {
    static const Libcrypto opened = [] {
        constexpr const char* kName = LLMC_LIBCRYPTO(OPENSSL_VERSION_MAJOR);
        void* const library = ::dlopen(kName, RTLD_NOW | RTLD_LOCAL);
        auto find = [&](const char* function) {
            void* const found = library ? ::dlsym(library, function) : nullptr;
            REQUIRE(found, "several hosts need %s, which cannot be used (%s): install OpenSSL's library there", kName,
                    ::dlerror());
            return found;
        };
        return Libcrypto{reinterpret_cast<decltype(&::HMAC)>(find("HMAC")),
                         reinterpret_cast<decltype(&::EVP_sha256)>(find("EVP_sha256")),
                         reinterpret_cast<decltype(&::CRYPTO_memcmp)>(find("CRYPTO_memcmp"))};
    }();
    return opened;
}

std::string hmac(const std::string& key, const std::string& text) {
    std::string mac(kMacBytes, '\0');
    unsigned bytes = 0;
    const Libcrypto& crypto = libcrypto();
    const unsigned char* done = crypto.hmac(crypto.sha256(), key.data(), static_cast<int>(key.size()),
                                            reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                                            reinterpret_cast<unsigned char*>(mac.data()), &bytes);
    CHECK(done && bytes == kMacBytes, "libcrypto computes no HMAC-SHA-256");
    return mac;
}
int compare(std::string_view a, std::string_view b) { return libcrypto().compare(a.data(), b.data(), a.size()); }
#else
std::string hmac(const std::string&, const std::string&) {
    FAIL(kExitBug, "no HMAC: built without OpenMPI, and so without libcrypto");
}
int compare(std::string_view, std::string_view) { FAIL(kExitBug, "no HMAC: built without OpenMPI"); }
#endif

}  // namespace

std::string random_bytes(size_t count) {
    std::string bytes(count, '\0');
    for (size_t done = 0; done < count;) {
        const ssize_t got = ::getrandom(bytes.data() + done, count - done, 0);
        CHECK(got > 0 || errno == EINTR, "getrandom: %s", std::strerror(errno));
        done += static_cast<size_t>(std::max<ssize_t>(got, 0));
    }
    return bytes;
}

bool same_mac(std::string_view a, std::string_view b) { return a.size() == b.size() && compare(a, b) == 0; }

// ---- frames

FrameCut cut_frame(std::string_view in, uint64_t most, Frame* frame) {
    FrameHead head;
    if (in.size() < sizeof head) return FrameCut::kPartial;
    std::memcpy(&head, in.data(), sizeof head);
    if (head.magic != kMagic || head.bytes > most) return FrameCut::kBroken;
    if (in.size() - sizeof head < head.bytes) return FrameCut::kPartial;
    *frame = {head.kind, in.substr(sizeof head, head.bytes), sizeof head + head.bytes};
    return FrameCut::kWhole;
}

std::string make_frame(uint32_t kind, std::string_view body) {
    const FrameHead head{kMagic, kind, body.size()};
    return std::string(bytes_of(head)).append(body);
}

std::string FrameSeal::mac(uint32_t kind, std::string_view body) const {
    return hmac(key_, std::string(bytes_of(number_)) + make_frame(kind, body));
}

std::string FrameSeal::seal(uint32_t kind, std::string_view body) {
    const std::string proof = mac(kind, body);
    number_++;
    return make_frame(kind, std::string(body) + proof);
}

bool FrameSeal::open(Frame* frame) {
    if (frame->body.size() < kMacBytes) return false;
    const std::string_view body = frame->body.substr(0, frame->body.size() - kMacBytes);
    if (!same_mac(frame->body.substr(body.size()), mac(frame->kind, body))) return false;
    number_++;
    frame->body = body;
    return true;
}

// ---- handshake

LinkHandshake::LinkHandshake(std::string secret, uint32_t host, std::string_view listener_nonce,
                             std::string_view connector_nonce)
    : secret_(std::move(secret)) {
    CHECK(listener_nonce.size() == kNonceBytes && connector_nonce.size() == kNonceBytes, "nonces of another length");
    transcript_.append(bytes_of(host)).append(listener_nonce).append(connector_nonce);
}

// The transcript has a fixed length, so no two pairs of purpose and transcript make the same text.
std::string LinkHandshake::derive(std::string_view purpose) const {
    return hmac(secret_, transcript_ + "llm.fp8 heartbeat link, " + std::string(purpose));
}
