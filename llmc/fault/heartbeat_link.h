// Copies heartbeats between hosts: the first rank of every host keeps a TCP connection to rank 0. Nothing blocks once
// the hosts are connected. Messages of a peer that does not know the run's secret are rejected.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

class HeartbeatLink {
public:
    // The bytes of kRows and kHangReport are not converted: both sides run the same build on the same architecture.
    enum Kind : uint32_t { kHello = 1, kWelcome, kRows, kHangReport };
    using Use = std::function<void(int peer, Kind kind, const std::string& bytes)>;

    // For rank 0: listens for connections from `hosts` hosts, numbered from 1, which connect() to address().
    static std::unique_ptr<HeartbeatLink> listen(const std::string& secret, int hosts);
    std::string address() const { return address_; }
    // Waits until all hosts are connected, at most `seconds`. Returns the numbers of those that are missing.
    std::vector<int> accept_all(double seconds);

    // For the first rank of host `host`. Null if rank 0 cannot be reached; *error lists the attempts.
    static std::unique_ptr<HeartbeatLink> connect(const std::string& address, const std::string& secret, int host,
                                              double seconds, std::string* error);

    ~HeartbeatLink();
    HeartbeatLink(const HeartbeatLink&) = delete;
    HeartbeatLink& operator=(const HeartbeatLink&) = delete;

    // Peers of rank 0: the other hosts; of the others: host 0.
    std::vector<int> peers() const;
    bool lost(int peer) const;   // its connection broke
    // Sends as much as the connection accepts; skips new rows while older ones are still being sent.
    void send(int peer, Kind kind, const std::string& bytes);
    void receive(const Use& use);
    // The sockets of the connected peers: readable when a message came or the peer is gone.
    std::vector<int> sockets() const;

private:
    struct Peer {
        int host = -1;   // -1: has not sent hello yet
        int fd = -1;
        std::string in, out;
        bool lost = false;
    };
    HeartbeatLink() = default;
    void accept_one();
    void read(Peer& peer, const Use& use);
    void parse(Peer& peer, const Use& use);
    void flush(Peer& peer);
    static void close(Peer& peer);
    bool greeted(Peer& peer, Kind kind, const std::string& bytes);

    std::string secret_, address_;
    int listen_fd_ = -1, hosts_ = 0;
    std::vector<std::unique_ptr<Peer>> peers_;
};
