// The frames of the link between hosts: how they are cut from the bytes of a connection, and how two hosts with a
// common secret recognize each other and each other's frames. The sockets are in heartbeat_link.
//
// The handshake, with fresh nonces from the kernel:
//   listener    challenge   its nonce
//   connector   hello       its host, its nonce, HMAC("hello", host, both nonces)
//   listener    welcome     HMAC("welcome", host, both nonces)
// The secret, which is the key, is not sent, and a proof is valid for one direction of one connection. Every later
// frame ends with an HMAC of its number, head and body under a key of this direction and connection, so a frame that
// was changed, repeated, left out, sent back or recorded earlier is noticed. Nothing is encrypted: an attacker who
// reads the network sees what the ranks do, and one who can change it can break the connection.
//
// HMAC-SHA-256 comes from libcrypto, which the first HMAC opens; exit 2 if it cannot be opened. A build without OpenMPI
// has no other hosts and no libcrypto: there an HMAC is an error (exit 1).
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

inline constexpr size_t kMacBytes = 32, kNonceBytes = 32, kFrameHeadBytes = 16;

std::string random_bytes(size_t count);   // from the kernel, fit for secrets

struct Frame {
    uint32_t kind = 0;
    std::string_view body;   // within the bytes that it was cut from
    size_t bytes = 0;        // of the whole frame, with its head
};
enum class FrameCut { kPartial, kWhole, kBroken };
// Sets *frame to the first frame of `in` if it is complete. It is broken if `in` does not begin like a frame, or if the
// body would be longer than `most`. Reads nothing but `in`.
FrameCut cut_frame(std::string_view in, uint64_t most, Frame* frame);
std::string make_frame(uint32_t kind, std::string_view body);

// One direction of a connection: one side seals, the other opens.
class FrameSeal {
public:
    FrameSeal() = default;
    explicit FrameSeal(std::string key) : key_(std::move(key)) {}
    std::string seal(uint32_t kind, std::string_view body);   // the next frame, kMacBytes longer than make_frame's
    // Whether this is the next frame of the other side; if so, removes the MAC from its body.
    bool open(Frame* frame);

private:
    std::string mac(uint32_t kind, std::string_view body) const;
    std::string key_;
    uint64_t number_ = 0;
};

// What both sides derive from the secret once they have exchanged nonces.
class LinkHandshake {
public:
    LinkHandshake() = default;
    LinkHandshake(std::string secret, uint32_t host, std::string_view listener_nonce, std::string_view connector_nonce);
    std::string hello_proof() const { return derive("hello"); }
    std::string welcome_proof() const { return derive("welcome"); }
    FrameSeal to_listener() const { return FrameSeal(derive("frames to the listener")); }
    FrameSeal to_connector() const { return FrameSeal(derive("frames to the connector")); }

private:
    std::string derive(std::string_view purpose) const;
    std::string secret_, transcript_;
};
bool same_mac(std::string_view a, std::string_view b);   // in a time that does not depend on their content
