// Keeps frames between hosts for a delay, and lets them in at each receiver's rate.
//
// Schedule says when a frame is due; it has no clock and no devices. run_forwarder has both:
// it reads frames from the hosts' TAP devices and writes each one when it is due.
#include <dlfcn.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"

namespace {

constexpr int64_t kDropped = -1;
constexpr int64_t kNever = INT64_MAX;
constexpr int64_t kSecond = 1000000000;

// One direction of a host's link: a token bucket behind a queue that drops what does not fit.
struct Direction {
  int64_t rate = 0;  // bytes a second; 0 has no limit
  int64_t burst_ns = 0;
  int64_t limit_bytes = 0;
  int64_t free_ns = INT64_MIN / 2;  // when all that was let in has passed

  int64_t span_ns(int64_t size_bytes) const {
    // in floating point, as a large burst in bytes and ns has more than 63 bits
    return rate > 0 ? static_cast<int64_t>(1e9 * static_cast<double>(size_bytes) /
                                           static_cast<double>(rate))
                    : 0;
  }
};

struct Link {
  Direction out;  // the kernel limits it; its figures date frames that were read late
  Direction in;
  bool up = true;
};

struct Frame {
  int64_t at_ns = 0;
  int64_t number = 0;  // settles ties, so that order is kept
  int64_t read_number = 0;
  int64_t wire_bytes = 0;
  int32_t source = 0;
  int32_t target = 0;
  bool arrived = false;  // at the receiver's downlink
  std::vector<uint8_t> bytes;
};

bool later(const Frame& one, const Frame& other) {
  return std::pair(one.at_ns, one.number) > std::pair(other.at_ns, other.number);
}

class Schedule {
 public:
  Schedule(int64_t num_hosts, int64_t delay_ns, int64_t jitter_ns)
      : links(num_hosts),
        num_hosts_(num_hosts),
        delay_ns_(delay_ns),
        jitter_ns_(jitter_ns),
        last_ns_(num_hosts * num_hosts, INT64_MIN) {}

  std::vector<Link> links;
  int64_t num_dropped = 0;

  // A frame that left its host at its time.
  void take(Frame frame) {
    // The order of what one host sends another is kept, whatever the jitter.
    int64_t& last_ns = last_ns_[frame.source * num_hosts_ + frame.target];
    last_ns = std::max(last_ns, frame.at_ns + delay_ns_ + draw());
    frame.at_ns = last_ns;
    frame.read_number = num_read_++;
    push(std::move(frame));
  }

  // When the next frame has to be looked at.
  int64_t next_ns() const { return waiting_.empty() ? kNever : waiting_.front().at_ns; }

  // The next frame that is due by now. Its time follows from the times at which frames were
  // read, and not from when this is called: a late forwarder takes no rate away.
  bool pop(int64_t now_ns, Frame& due) {
    while (next_ns() <= now_ns) {
      std::pop_heap(waiting_.begin(), waiting_.end(), later);
      Frame frame = std::move(waiting_.back());
      waiting_.pop_back();
      if (frame.arrived) {
        due = std::move(frame);
        return true;
      }
      enter(std::move(frame));
    }
    return false;
  }

 private:
  void push(Frame frame) {
    frame.number = num_pushed_++;
    waiting_.push_back(std::move(frame));
    std::push_heap(waiting_.begin(), waiting_.end(), later);
  }

  // Lets a frame that arrives into its receiver's link.
  void enter(Frame frame) {
    if (!links[frame.target].up || !links[frame.source].up) {
      ++num_dropped;
      return;
    }
    Direction& in = links[frame.target].in;
    frame.arrived = true;
    if (in.rate > 0) {
      const int64_t waits_ns = std::max<int64_t>(0, in.free_ns - frame.at_ns);
      if (waits_ns + in.span_ns(frame.wire_bytes) > in.span_ns(in.limit_bytes)) {
        ++num_dropped;
        return;
      }
      in.free_ns =
          std::max(in.free_ns, frame.at_ns - in.burst_ns) + in.span_ns(frame.wire_bytes);
      frame.at_ns = std::max(frame.at_ns, in.free_ns);
    }
    push(std::move(frame));
  }

  // Evenly from 0 to the jitter: splitmix64, the same in every run.
  int64_t draw() {
    if (jitter_ns_ == 0) return 0;
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<int64_t>((z ^ (z >> 31)) % static_cast<uint64_t>(jitter_ns_ + 1));
  }

  int64_t num_hosts_;
  int64_t delay_ns_;
  int64_t jitter_ns_;
  std::vector<int64_t> last_ns_;
  std::vector<Frame> waiting_;  // a heap
  int64_t num_read_ = 0;
  int64_t num_pushed_ = 0;
  uint64_t state_ = 0;
};

// When frames left their host that are read together now, while none was there at empty_ns.
// They cannot have left faster than the link's rate allows behind a burst. So a forwarder that
// had no core for a while dates them as they left, and not all at once.
void date(std::vector<Frame>& frames, const Direction& out, int64_t empty_ns, int64_t now_ns) {
  int64_t later_ns = -out.burst_ns;
  for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame) {
    frame->at_ns = std::max(std::min(empty_ns, now_ns), now_ns - std::max<int64_t>(0, later_ns));
    later_ns += out.span_ns(frame->wire_bytes);
  }
}

// ---- frames ------------------------------------------------------------------------------

constexpr size_t kEthernet = 14;
constexpr size_t kLargest = 1 << 17;
constexpr uint8_t kPrefix[5] = {0x02, 0x67, 0x77, 0x00, 0x00};

// linux/virtio_net.h: stands before each frame.
struct Offload {
  uint8_t flags;
  uint8_t gso_type;
  uint16_t header_bytes;
  uint16_t segment_bytes;
  uint16_t checksum_start;
  uint16_t checksum_offset;
};

// The host that a frame is for; -1 if there is none.
int32_t target_of(const uint8_t* frame, int64_t num_hosts) {
  if (std::memcmp(frame, kPrefix, sizeof kPrefix) != 0) return -1;
  const int32_t host = frame[5] - 1;
  return host < num_hosts ? host : -1;
}

// A piece that the kernel hands over at once is several frames on a wire, each with headers.
int64_t wire_bytes_of(const uint8_t* piece, size_t size_bytes) {
  Offload offload;
  std::memcpy(&offload, piece, sizeof offload);
  const uint8_t* frame = piece + sizeof offload;
  const int64_t frame_bytes = static_cast<int64_t>(size_bytes - sizeof offload);
  const int64_t tcp = offload.checksum_start;
  if (offload.gso_type == 0 || offload.segment_bytes == 0 || tcp + 13 > frame_bytes) {
    return frame_bytes;
  }
  const int64_t header_bytes = tcp + 4 * (frame[tcp + 12] >> 4);
  const int64_t payload_bytes = frame_bytes - header_bytes;
  const int64_t num_frames = (payload_bytes + offload.segment_bytes - 1) / offload.segment_bytes;
  return frame_bytes + std::max<int64_t>(0, num_frames - 1) * header_bytes;
}

// ---- the process -------------------------------------------------------------------------

int64_t clock_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

class Forwarder {
 public:
  Forwarder(const int32_t* taps, int64_t num_hosts, int64_t delay_ns, int64_t jitter_ns)
      : schedule_(num_hosts, delay_ns, jitter_ns),
        tolerance_ns_(std::max<int64_t>(kSecond / 2000, delay_ns / 20)),
        buffer_(kLargest),
        empty_ns_(num_hosts, kNever) {
    for (int64_t host = 0; host < num_hosts; ++host) polled_.push_back({taps[host], POLLIN, 0});
    polled_.push_back({STDIN_FILENO, POLLIN, 0});
  }

  // Returns when standard input ends.
  void run() {
    started_ns_ = clock_ns(CLOCK_MONOTONIC);
    window_ns_ = started_ns_;
    cpu_started_ns_ = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    window_cpu_ns_ = cpu_started_ns_;
    while (true) {
      deliver();
      wait();
      for (size_t host = 0; host + 1 < polled_.size(); ++host) {
        if (polled_[host].revents != 0) collect(static_cast<int32_t>(host));
      }
      if (polled_.back().revents != 0 && !obey()) return;
    }
  }

 private:
  static constexpr size_t kAtOnce = 1 << 14;  // more than a device's queue holds, so that all of it is dated together

  void deliver() {
    Frame frame;
    int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    while (schedule_.pop(now_ns, frame)) {
      num_late_ += now_ns - frame.at_ns > tolerance_ns_;
      ++num_frames_;
      if (write(polled_[frame.target].fd, frame.bytes.data(), frame.bytes.size()) < 0) {
        ++schedule_.num_dropped;
      }
      now_ns = clock_ns(CLOCK_MONOTONIC);
    }
  }

  void wait() {
    const int64_t begin_ns = clock_ns(CLOCK_MONOTONIC);
    const int64_t next_ns = schedule_.next_ns();
    const int64_t left_ns =
        next_ns == kNever ? kSecond : std::clamp<int64_t>(next_ns - begin_ns, 0, kSecond);
    const timespec limit = {left_ns / kSecond, left_ns % kSecond};
    if (ppoll(polled_.data(), polled_.size(), &limit, nullptr) < 0) {
      for (pollfd& one : polled_) one.revents = 0;
    }
    const int64_t end_ns = clock_ns(CLOCK_MONOTONIC);
    if (end_ns - window_ns_ >= kSecond) {
      const int64_t cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
      busiest_ = std::max(busiest_, static_cast<double>(cpu_ns - window_cpu_ns_) /
                                        static_cast<double>(end_ns - window_ns_));
      window_ns_ = end_ns;
      window_cpu_ns_ = cpu_ns;
    }
  }

  void collect(int32_t host) {
    const Link& link = schedule_.links[host];
    const int64_t num_hosts = static_cast<int64_t>(schedule_.links.size());
    batch_.clear();
    bool is_empty = false;
    while (!is_empty && batch_.size() < kAtOnce) {
      const ssize_t got = read(polled_[host].fd, buffer_.data(), buffer_.size());
      is_empty = got < static_cast<ssize_t>(sizeof(Offload) + kEthernet);
      if (is_empty) break;
      Frame frame;
      frame.source = host;
      frame.target = target_of(buffer_.data() + sizeof(Offload), num_hosts);
      if (frame.target < 0 || !link.up || !schedule_.links[frame.target].up) continue;
      frame.wire_bytes = wire_bytes_of(buffer_.data(), static_cast<size_t>(got));
      frame.bytes.assign(buffer_.data(), buffer_.data() + got);
      batch_.push_back(std::move(frame));
    }
    const int64_t now_ns = clock_ns(CLOCK_MONOTONIC);
    date(batch_, link.out, empty_ns_[host], now_ns);
    if (is_empty) empty_ns_[host] = now_ns;
    for (Frame& frame : batch_) schedule_.take(std::move(frame));
  }

  // Does what the lines of standard input say, and answers each one; false at its end.
  bool obey() {
    char piece[4096];
    const ssize_t got = read(STDIN_FILENO, piece, sizeof piece);
    if (got <= 0) return false;
    lines_.append(piece, static_cast<size_t>(got));
    for (size_t end; (end = lines_.find('\n')) != std::string::npos; lines_.erase(0, end + 1)) {
      answer(lines_.substr(0, end));
    }
    return true;
  }

  void answer(const std::string& line) {
    long long host = 0, first = 0, second = 0, third = 0;
    const int found =
        std::sscanf(line.c_str(), "%*s %lld %lld %lld %lld", &host, &first, &second, &third);
    const int64_t num_hosts = static_cast<int64_t>(schedule_.links.size());
    if (found > 0 && host >= 0 && host < num_hosts) {
      Link& link = schedule_.links[host];
      if (line[0] == 'l') {
        link.up = first != 0;
      } else {
        Direction& direction = line[0] == 'o' ? link.out : link.in;
        direction.rate = first;
        direction.burst_ns = second;
        direction.limit_bytes = third;
      }
    }
    const int64_t wall_ns = clock_ns(CLOCK_MONOTONIC) - started_ns_;
    dprintf(STDOUT_FILENO, "%lld %lld %lld %lld %lld %lld\n",
            static_cast<long long>(num_frames_), static_cast<long long>(schedule_.num_dropped),
            static_cast<long long>(num_late_),
            static_cast<long long>(clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_started_ns_),
            static_cast<long long>(wall_ns),
            static_cast<long long>(busiest_ * 1000));
  }

  Schedule schedule_;
  int64_t tolerance_ns_;
  std::vector<uint8_t> buffer_;
  std::vector<Frame> batch_;
  std::vector<int64_t> empty_ns_;  // when a host's device was last seen without frames
  std::vector<pollfd> polled_;  // the hosts' devices, then standard input
  std::string lines_;
  int64_t started_ns_ = 0;
  int64_t cpu_started_ns_ = 0;
  int64_t window_ns_ = 0;
  int64_t window_cpu_ns_ = 0;
  double busiest_ = 0;
  int64_t num_frames_ = 0;
  int64_t num_late_ = 0;
};

}  // namespace

// Forwards frames between these devices until standard input ends.
GW_EXPORT void run_forwarder(const int32_t* taps, int64_t num_hosts, int64_t delay_ns, int64_t jitter_ns) {
  Forwarder(taps, num_hosts, delay_ns, jitter_ns).run();
}

// The path of the file that this was loaded from, or an empty one.
GW_EXPORT void name_library(uint8_t* path, int64_t size_bytes) {
  Dl_info found = {};
  dladdr(reinterpret_cast<const void*>(&name_library), &found);
  std::snprintf(reinterpret_cast<char*>(path), static_cast<size_t>(size_bytes), "%s",
                found.dli_fname == nullptr ? "" : found.dli_fname);
}

// The times at which frames are due, or kDropped, of four numbers a frame: when it was read,
// its source, its target and its bytes on the wire. links has three a host: bytes a second,
// burst in ns, and limit in bytes. Due frames are asked for at every frame, or once at the end.
GW_EXPORT void schedule_frames(int64_t num_hosts, int64_t delay_ns, int64_t jitter_ns, const int64_t* links, const int64_t* frames, int64_t num_frames, int64_t asks_often, int64_t* due_ns) {
  Schedule schedule(num_hosts, delay_ns, jitter_ns);
  for (int64_t host = 0; host < num_hosts; ++host) {
    Direction& in = schedule.links[host].in;
    in.rate = links[3 * host];
    in.burst_ns = links[3 * host + 1];
    in.limit_bytes = links[3 * host + 2];
  }
  std::fill(due_ns, due_ns + num_frames, kDropped);
  const auto note = [&](int64_t now_ns) {
    for (Frame due; schedule.pop(now_ns, due);) due_ns[due.read_number] = due.at_ns;
  };
  for (int64_t at = 0; at < num_frames; ++at) {
    const int64_t* given = frames + 4 * at;
    if (asks_often) note(given[0]);
    Frame frame;
    frame.source = static_cast<int32_t>(given[1]);
    frame.target = static_cast<int32_t>(given[2]);
    frame.wire_bytes = given[3];
    frame.at_ns = given[0];
    schedule.take(std::move(frame));
  }
  note(kNever - 1);
}

// The bytes on the wire of a piece of TCP that the kernel hands over, with its 10 bytes before it.
GW_EXPORT int64_t piece_wire_bytes(const uint8_t* piece, int64_t size_bytes) {
  return wire_bytes_of(piece, static_cast<size_t>(size_bytes));
}

// The times at which frames of these bytes left a host, that were read at once.
GW_EXPORT void date_frames(int64_t rate, int64_t burst_ns, int64_t empty_ns, int64_t now_ns, const int64_t* sizes, int64_t num_frames, int64_t* left_ns) {
  Direction out;
  out.rate = rate;
  out.burst_ns = burst_ns;
  std::vector<Frame> frames(num_frames);
  for (int64_t at = 0; at < num_frames; ++at) frames[at].wire_bytes = sizes[at];
  date(frames, out, empty_ns, now_ns);
  for (int64_t at = 0; at < num_frames; ++at) left_ns[at] = frames[at].at_ns;
}
