// Copies heartbeats between hosts: the first rank of every host keeps a TCP connection to rank 0. Nothing blocks once
// the hosts are connected. Rank 0 listens until all hosts are connected. It buffers only a few bytes of a connection
// whose other side has not proved that it knows the run's secret. link_frames.h describes this proof, and how frames
// are protected.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "llmc/fault/link_frames.h"

// Where rank 0 listens.
struct LinkPlace {
    // Names of interfaces as in NCCL_SOCKET_IFNAME ("eth,ib": names that begin so, "=eth0": exactly this name,
    // "^docker": all others), or IPv4 addresses and networks as in OpenMPI's btl_tcp_if_include ("10.1.0.0/16"). "":
    // all interfaces that are up.
    std::string interfaces;
    int first_port = 0, last_port = 0;   // 0: any free one
};
// Environment variables of rank 0, since the ranks are connected before options are read.
inline constexpr const char* kInterfaceVariable = "LLMFP8_SOCKET_IFNAME";
inline constexpr const char* kPortsVariable = "LLMFP8_SOCKET_PORTS";   // "N" or "FIRST-LAST"
LinkPlace link_place_of_environment();   // exit 2, naming the variable and its value

class HeartbeatLink {
public:
    // The bytes of kRows and kHangReport are not converted: both sides run the same build on the same architecture.
    enum Kind : uint32_t { kChallenge = 1, kHello, kWelcome, kRows, kHangReport };
    using Use = std::function<void(int peer, Kind kind, const std::string& bytes)>;

    // For rank 0: listens for connections from `hosts` hosts, numbered from 1, which connect() to address(). Exit 2 if
    // it cannot listen there.
    static std::unique_ptr<HeartbeatLink> listen(const std::string& secret, int hosts, const LinkPlace& place = {});
    std::string address() const { return address_; }   // "IP:PORT ..."
    // Waits until all hosts are connected, at most `seconds`, and stops listening. Returns the numbers of those that
    // are missing.
    std::vector<int> accept_all(double seconds);

    // For the first rank of host `host`. Null if rank 0 cannot be reached in `seconds`; *error lists the attempts.
    static std::unique_ptr<HeartbeatLink> connect(const std::string& address, const std::string& secret, int host,
                                                  double seconds, std::string* error);

    ~HeartbeatLink();
    HeartbeatLink(const HeartbeatLink&) = delete;
    HeartbeatLink& operator=(const HeartbeatLink&) = delete;

    // Peers of rank 0: the other hosts; of the others: host 0.
    std::vector<int> peers() const;
    bool lost(int peer) const;   // its connection broke, or it sent a frame that does not belong to this connection
    // Sends as much as the connection accepts; skips new rows while older ones are still being sent.
    void send(int peer, Kind kind, const std::string& bytes);
    void receive(const Use& use);   // at most 1 MiB of each peer
    // The sockets of the connected peers: readable when a message came or the peer is gone.
    std::vector<int> sockets() const;

private:
    using Clock = std::chrono::steady_clock;
    struct Peer {
        int host = -1;   // -1: a stranger, which has not proved that it knows the secret
        int fd = -1;
        std::string in, out;
        bool lost = false;
        Clock::time_point since = Clock::now();
        std::string nonce;   // this side's
        bool challenged = false;
        LinkHandshake handshake;
        FrameSeal sent, received;
    };
    HeartbeatLink() = default;
    Peer& add_peer(int fd);
    void accept_waiting();
    void drop_strangers();
    void stop_listening();
    void read(Peer& peer, const Use& use);
    void parse(Peer& peer, const Use& use);
    void flush(Peer& peer);
    static void close(Peer& peer);
    void write(Peer& peer, const std::string& frame);
    bool greet(Peer& peer, const Frame& frame);
    bool greet_connector(Peer& peer, const Frame& frame);
    bool greet_listener(Peer& peer, const Frame& frame);

    std::string secret_, address_;
    std::vector<int> listening_;   // one socket for each address
    int own_host_ = 0, hosts_ = 0;
    std::vector<std::unique_ptr<Peer>> peers_;
};
