// The client side of transfers: one opened segment. Keeps a control connection and one connection
// for each rail, distributes slices, moves them elsewhere when a rail fails, and decides when the
// peer is lost.
//
// Fences. A connection that is given up with unconfirmed WRITEs may have left slices in the
// kernel's buffers, which the peer could apply later. So it is recorded as a debt in the ledger of
// the process, and every connection to that peer that carries slices from then on first sends a
// fence: the peer closes the old connection before it reads the next frame of the new one. Copies
// through memory wait for the peer's answer. Hence no slice that was sent again, or that came
// after, by whatever segment, engine or transport of this process, can be overwritten by a late
// one.
//
// Lock order: (1) Connection::read_mutex_, (2) Peer::mutex_, (3) Connection::mutex_. The owner is
// called without mutex_.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/threads/thread_annotations.h"
#include "transfer/engine/batch.h"
#include "transfer/connections/call_client.h"
#include "transfer/connections/connection.h"
#include "transfer/engine/counters.h"
#include "transfer/engine/fence_ledger.h"
#include "transfer/memory/mapping.h"
#include "transfer/rails/nic_quota.h"
#include "transfer/rails/rail_set.h"
#include "transfer/rails/socket_address.h"

namespace tandem::transfer {

class ClientConnection;

struct PeerOptions {
  std::string name;  // Ours, as told to the peer.
  std::string secret;
  ProcessId process;
  std::vector<std::string> local_addresses;  // One rail per (local, remote); empty: any.
  std::vector<double> bandwidths_bytes_per_s;  // Of the local addresses, where known.
  // Distance factor of the prediction by [location of memory][local address]; location 0 is
  // unknown.
  std::vector<std::vector<double>> penalties;
  std::vector<std::shared_ptr<NicQuota>> quotas;  // Of the local addresses; empty: none.
  int lanes = 1;                             // Connections per pair of addresses.
  std::vector<TransportKind> transports;     // Allowed ones, best first.
  SprayOptions spray;
  std::shared_ptr<MappedFiles> mapped_files;  // Of all peers of the engine. Never null.
  std::shared_ptr<FenceLedger> fences;        // Of the process. Never null.
  int64_t lease_ns = 2'000'000'000;
  int64_t handshake_timeout_ns = 1'000'000'000;
  int socket_buffer_bytes = 0;
  bool has_checksum = false;
  TagOptions tags;         // As the server's; the engine sets both.
  RefusedRecords refused = std::make_shared<std::atomic<uint64_t>>(0);
};

struct RailStatus {
  std::string local;
  std::string remote;
  RailState state = RailState::kClosed;
  uint64_t bytes_moved = 0;
  uint64_t num_resent = 0;       // Slices that were given to it and had to go elsewhere.
  uint64_t in_flight_bytes = 0;
  double bandwidth_bytes_per_s = 0;
  double predicted_s = 0;        // Until what it has now would be moved.
  LatencyHistogram latencies;    // Of its slices, from the choice to the answer.
  TagKind tags = TagKind::kNone;
};

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // Services that the engine provides to a peer. Called without the peer's mutex.
  struct Owner {
    std::function<void(int64_t due_ns)> schedule;
    std::function<void(const std::shared_ptr<Batch>&, Error)> abort;
    std::function<void(std::vector<Piece>, std::shared_ptr<Mapping>)> copy;
  };

  Peer(PeerOptions options, SocketAddress address, std::vector<EventLoop*> loops, Owner owner);
  ~Peer();

  // Connects, proves the secret, and reads the list of buffers. Errors: kPeerLost,
  // kPermissionDenied, kUnsupported (versions), kDeadline.
  Status open(int64_t deadline_ns);
  // Says good-bye. Running batches fail.
  void close();

  Result<Description> describe(int64_t deadline_ns);
  Status notify(const std::string& name, const std::string& payload, int64_t deadline_ns);
  // Sends a call, which ends at the latest by `abandon_call`. Errors: kConfig (size), kCapacity,
  // kUnsupported (the peer speaks an older version), kPeerLost.
  Result<std::shared_ptr<PendingCall>> begin_call(std::string payload,
                                                  std::shared_ptr<CallInbox> inbox, uint64_t tag);
  void abandon_call(const std::shared_ptr<PendingCall>& call, Error error) {
    calls_.abandon(call, std::move(error));
  }
  // Gives pieces to the best of the allowed transports.
  void submit(std::vector<Piece> pieces);
  // Gives a piece whose transport failed to the next one.
  void fall_back(Piece piece, TransportKind failed, Error error);
  // Takes back all work of a batch. After the return no byte of its local buffers is touched.
  // REQUIRES: the batch is not open.
  void drop(const Batch& batch);

  // Does the work that is due, and returns the time of the next call. `late_ns`: delay of this
  // call.
  int64_t tick(int64_t now_ns, int64_t late_ns);
  std::vector<RailStatus> rails() const;
  // Reasons why transports are not used, by name; empty for those that are used or were not tried.
  std::map<std::string, std::string> refusals() const;
  uint64_t epoch() const { return epoch_.load(); }
  TransferCounters& counters() { return counters_; }
  void use_round_robin();
  // Handles a network interface of this host that went down or returned.
  void on_link(const std::vector<SocketAddress>& addresses, bool is_up);

 private:
  friend class ClientConnection;
  enum class State { kOpening, kOpen, kLost, kClosed };
  struct Slice {
    Piece piece;  // Exactly the slice.
    uint32_t rail;
    int64_t begin_ns;
  };
  struct Rail {
    SocketAddress local;
    SocketAddress remote;
    std::shared_ptr<ClientConnection> connection;
    uint64_t bytes_moved = 0;
    uint64_t num_resent = 0;
    LatencyHistogram latencies;
    std::shared_ptr<NicQuota> quota;
    // Slices that were sent over the connection, oldest first. Answers come in this order.
    struct Sent {
      uint64_t ticket;
      bool is_write;
    };
    std::deque<Sent> sent;

    bool has_unconfirmed_writes() const {
      return std::any_of(sent.begin(), sent.end(), [](const Sent& one) { return one.is_write; });
    }
  };
  // A piece for a copy, which waits until the peer has confirmed the fences that it is owed.
  struct Held {
    Piece piece;
    std::optional<TransportKind> failed;
  };
  struct Direct {
    uint64_t length = 0;
    std::vector<std::shared_ptr<Mapping>> mappings;  // Best first; none: not reachable directly.
  };
  struct Notice {
    uint64_t sequence = 0;
    std::string payload;
    bool is_answered = true;
    uint8_t outcome = 0;
  };
  // Work to be done after mutex_ is released.
  struct Work {
    void flush(const std::shared_ptr<ClientConnection>& connection) {
      if (std::find(to_flush.begin(), to_flush.end(), connection) == to_flush.end())
        to_flush.push_back(connection);
    }
    void copy(Piece piece, const std::shared_ptr<Mapping>& mapping) {
      if (to_copy.empty() || to_copy.back().second != mapping) to_copy.emplace_back().second = mapping;
      to_copy.back().first.push_back(std::move(piece));
    }

    std::vector<std::shared_ptr<ClientConnection>> to_flush;
    std::vector<std::pair<std::shared_ptr<Batch>, Error>> to_abort;
    std::vector<std::pair<std::vector<Piece>, std::shared_ptr<Mapping>>> to_copy;
    std::vector<std::shared_ptr<Mapping>> to_revoke;
    int64_t due_ns = std::numeric_limits<int64_t>::max();
  };

  // Called by connections, without mutex_.
  void on_ready(const std::shared_ptr<ClientConnection>& connection);
  Status on_frame(const std::shared_ptr<ClientConnection>& connection, const Frame& frame,
                  std::string payload, bool is_intact);
  void on_closed(const std::shared_ptr<ClientConnection>& connection, const Error& reason);

  // REQUIRES: mutex_ held.
  void dispatch(Work& work);
  void route(Piece piece, Work& work, std::optional<TransportKind> failed = std::nullopt);
  bool route_direct(const Piece& piece, Work& work, std::optional<TransportKind> failed,
                    bool is_before_tcp);
  bool is_wanted(const Piece& piece, TransportKind kind, std::optional<TransportKind> failed,
                 bool is_before_tcp) const;
  size_t rank(TransportKind kind) const;
  void leave_rails(Work& work);
  void take_back(std::shared_ptr<ClientConnection> connection, Error reason, Work& work);
  // Returns true while copies must wait for the answer to a fence.
  bool send_fences(ClientConnection& connection);
  void owe_fence(const ClientConnection& connection, bool may_write);
  void settle_fences(std::vector<FenceDebt> debts, Work& work);
  void resume_copies(Work& work);
  bool is_copy_held(const Piece& piece, Work& work, std::optional<TransportKind> failed);
  Status check_order(const std::shared_ptr<ClientConnection>& connection, uint64_t ticket);
  void on_slice_done(const Frame& frame, const std::string& payload, bool is_intact, Work& work);
  void on_granted(const ClientConnection& connection, const Frame& frame,
                  const std::string& payload, Work& work);
  void lose_connection(const std::shared_ptr<ClientConnection>& connection, const Error& reason,
                       Work& work);
  void give_up(State state, const Error& error, Work& work);
  void connect_control(int64_t now_ns, Work& work);
  void connect_rail(uint32_t rail, int64_t now_ns);
  // Time at which an attempt to connect that is not ready yet is given up.
  int64_t connect_due(uint32_t rail) const;
  void connect_calls(int64_t now_ns);
  bool is_calls_connect_due(int64_t now_ns) const;
  void check_calls(int64_t now_ns, Work& work);
  Result<std::shared_ptr<ClientConnection>> make_connection(Role role, uint32_t rail,
                                                            const SocketAddress& remote,
                                                            const SocketAddress& local);
  void make_rails();
  void check_liveness(int64_t now_ns, Work& work);
  // True if slices or copies are running; calls do not count.
  bool has_work() const;
  bool has_ready_connection() const;
  int64_t next_due() const;
  uint64_t grant_key(uint64_t offset) const;
  const Direct* find_direct(uint64_t offset) const;
  void begin_work();
  bool is_allowed(TransportKind kind) const;

  // REQUIRES: mutex_ not held.
  void finish(Work work);

  const PeerOptions options_;
  const SocketAddress address_;
  const std::vector<EventLoop*> loops_;
  const Owner owner_;
  const std::string session_;
  std::atomic<uint64_t> epoch_{0};
  TransferCounters counters_;

  Mutex notify_mutex_;  // One notification at a time. Before mutex_.
  mutable Mutex mutex_;
  CondVar changed_;
  State state_ = State::kOpening;
  Error lost_reason_;
  uint32_t next_connection_id_ = 1;
  uint64_t num_descriptions_ = 0;
  Description description_;
  int64_t heard_ns_ = 0;
  int64_t awake_since_ns_ = 0;  // No silence counts from before: we slept.
  int64_t pinged_ns_ = 0;
  RailHealth control_health_;
  std::shared_ptr<ClientConnection> control_;
  uint16_t version_ = 0;  // Of the last control connection.
  CallClient calls_;
  // Made with the first call, and anew when a later call needs it.
  std::shared_ptr<ClientConnection> calls_connection_;
  RailHealth calls_health_;
  int64_t calls_pinged_ns_ = 0;
  RailSet rail_set_;
  std::vector<Rail> rails_;
  std::deque<Piece> pending_;
  std::unordered_map<uint64_t, Slice> slices_;  // By ticket.
  std::vector<Held> awaiting_fence_;
  std::map<uint64_t, Direct> directs_;                      // By base.
  std::map<uint64_t, std::vector<Piece>> awaiting_grant_;   // By the offset asked for.
  std::map<std::string, std::string> refusals_;
  Notice notice_;
};

// A connection from this process to a peer.
class ClientConnection : public Connection {
 public:
  ClientConnection(std::weak_ptr<Peer> peer, EventLoop* loop, int fd, Role role, uint32_t rail,
                   uint32_t id, uint64_t carrier);

  Role role() const { return role_; }
  uint32_t rail() const { return rail_; }
  // The connection's id in the fence ledger.
  uint64_t carrier() const { return carrier_; }
  uint32_t id() const { return id_; }
  int64_t begin_ns() const { return begin_ns_; }
  // Time at which the other host's kernel accepted the connection; 0 before.
  int64_t connected_ns() const { return connected_ns_.load(std::memory_order_acquire); }
  bool is_ready() const { return is_ready_.load(std::memory_order_acquire); }
  // The agreed protocol version; 0 before the handshake.
  uint16_t version() const { return version_.load(std::memory_order_acquire); }
  // True if either side refused in the handshake, so that trying again is useless.
  bool is_barred() const { return is_barred_.load(std::memory_order_acquire); }
  EventLoop* loop() const { return loop_; }

  void send_write(uint64_t ticket, uint64_t offset, const uint8_t* data, uint64_t length,
                  bool has_checksum);
  void send_read(uint64_t ticket, uint64_t offset, uint8_t* data, uint64_t length,
                 bool has_checksum);
  // Discards the bytes of this slice that still arrive.
  void drop_read(uint64_t ticket);
  // Returns false if part of the slice was sent: then only closing the connection takes it back.
  bool drop_write(uint64_t ticket);

 protected:
  void on_connected() override;
  Status check_header(const Frame& frame) override REQUIRES(mutex_);
  Sink on_slice_begin(const Frame& frame) override REQUIRES(mutex_);
  void on_slice_end(const Frame& frame, bool is_intact) override REQUIRES(mutex_);
  Status on_frame(const Frame& frame, std::string payload) override;
  void on_closed(const Error& reason) override;
  void on_shut() override REQUIRES(mutex_) { reads_.clear(); }

 private:
  Status on_challenge(std::string_view payload, Peer& peer);
  Status choose_tags(const Challenge& challenge, const TagOptions& options, TagKind* choice) const;
  Status bar(Error error);

  struct Read {
    uint8_t* data;
    uint64_t length;
  };
  const std::weak_ptr<Peer> peer_;
  const Role role_;
  const uint32_t rail_;
  const uint32_t id_;
  const uint64_t carrier_;
  const int64_t begin_ns_;
  std::atomic<int64_t> connected_ns_{0};
  std::atomic<bool> is_ready_{false};
  std::atomic<uint16_t> version_{0};
  std::atomic<bool> is_barred_{false};
  std::string hello_;
  bool asks_for_tags_ = false;
  bool has_proved_ = false;
  std::unordered_map<uint64_t, Read> reads_ GUARDED_BY(mutex_);  // By ticket.
  bool last_is_intact_ = true;                // Under read_mutex_.
};

}  // namespace tandem::transfer
