// Loaded before libc (LD_PRELOAD): flips one bit of what a process writes to its TCP connections.
//
// gloo's pairs send by writev: a header of their own, and the payload behind it. Calls without a
// payload pass.

#include <dlfcn.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <mutex>
#include <vector>

namespace {

std::mutex mutex;
long calls = 0;
long target = -1;
double place = 0;
bool with_header = false;
int report = -1;

bool is_tcp(int fd) {
  int protocol = 0;
  socklen_t length = sizeof(protocol);
  return !getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) && protocol == IPPROTO_TCP;
}

}  // namespace

// From now on calls are counted. In the one of number `at` the bit at `where`, in [0, 1), flips, of
// the payload or of all that the call writes. The file `fd` then says which byte it was.
extern "C" void gw_flip(long at, double where, int header, int fd) {
  std::lock_guard<std::mutex> guard(mutex);
  calls = 0;
  target = at;
  place = where;
  with_header = header;
  report = fd;
}

extern "C" long gw_calls() {
  std::lock_guard<std::mutex> guard(mutex);
  return calls;
}

extern "C" ssize_t writev(int fd, const iovec* parts, int count) {
  static const auto original =
      reinterpret_cast<ssize_t (*)(int, const iovec*, int)>(dlsym(RTLD_NEXT, "writev"));
  if (count != 2 || !is_tcp(fd)) return original(fd, parts, count);
  std::lock_guard<std::mutex> guard(mutex);
  if (calls != target) {
    const ssize_t written = original(fd, parts, count);
    calls += written > 0;
    return written;
  }
  const size_t header = parts[0].iov_len, size = header + parts[1].iov_len;
  std::vector<unsigned char> bytes(size);
  memcpy(bytes.data(), parts[0].iov_base, header);
  memcpy(bytes.data() + header, parts[1].iov_base, size - header);
  const size_t first = with_header ? 0 : header;
  const size_t bit = static_cast<size_t>(place * static_cast<double>((size - first) * 8));
  const size_t at = first + bit / 8;
  bytes[at] ^= 1 << bit % 8;
  const iovec spoilt{bytes.data(), size};
  const ssize_t written = original(fd, &spoilt, 1);
  calls += written > 0;
  if (written > static_cast<ssize_t>(at))
    dprintf(report, "%s %zu of %zu\n", at < header ? "header" : "payload", at, size);
  else
    target = calls;  // it has not left yet: the next call is struck
  return written;
}
