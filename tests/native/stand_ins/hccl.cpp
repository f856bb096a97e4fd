// SPDX-License-Identifier: Apache-2.0
// libhccl for several processes on one machine: each rank publishes what it sends in shared memory, meets the others,
// and takes its part. Runs on the given stream, like the real one.
#include <fcntl.h>
#include <hccl/hccl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "streams.h"

namespace stand_in {
namespace {

constexpr auto kPatience = std::chrono::seconds(150);

[[noreturn]] void give_up(const std::string& why) {
  std::fprintf(stderr, "stand-in for libhccl: %s\n", why.c_str());
  std::_Exit(70);
}

std::string path_of(const std::string& name) {
  return "/dev/shm/" + name;
}

// A file in /dev/shm, mapped.
class Shared {
 public:
  Shared(const std::string& name, size_t size, bool create) {
    const std::string path = path_of(name);
    const int file = open(path.c_str(), create ? O_RDWR | O_CREAT : O_RDWR, 0600);
    if (file < 0) give_up("cannot open " + path);
    if (create && ftruncate(file, static_cast<off_t>(size)) != 0) give_up("cannot size " + path);
    struct stat facts{};
    fstat(file, &facts);
    size_ = static_cast<size_t>(facts.st_size);
    at_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at_ == MAP_FAILED) give_up("cannot map " + path);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  ~Shared() { munmap(at_, size_); }

  char* data() const { return static_cast<char*>(at_); }
  size_t size() const { return size_; }
  static void remove(const std::string& name) { unlink(path_of(name).c_str()); }
  static bool exists(const std::string& name) { return access(path_of(name).c_str(), F_OK) == 0; }
  static void rename(const std::string& from, const std::string& to) {
    if (std::rename(path_of(from).c_str(), path_of(to).c_str()) != 0) give_up("cannot rename " + from);
  }

 private:
  void* at_;
  size_t size_;
};

struct Meeting {
  std::atomic<uint32_t> arrived, round;
};

size_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT64:
    case HCCL_DATA_TYPE_UINT64:
    case HCCL_DATA_TYPE_FP64:
      return 8;
    default:
      return 4;
  }
}

// The piece for each rank: offset and length in bytes.
struct Piece {
  uint64_t offset, length;
};

class Group {
 public:
  Group(std::string id, uint32_t size, uint32_t rank)
      : id(std::move(id)), size(size), rank(rank), place_(this->id, sizeof(Meeting), true) {
    meet();
  }
  ~Group() {
    if (rank == 0) Shared::remove(id);
  }

  const std::string id;
  const uint32_t size, rank;

  // Waits until all ranks are here. A rank that never arrives ends the process, so that a test does not hang.
  void meet() {
    auto& meeting = *reinterpret_cast<Meeting*>(place_.data());
    const uint32_t round = meeting.round.load();
    if (meeting.arrived.fetch_add(1) + 1 == size) {
      meeting.arrived = 0;
      ++meeting.round;
      return;
    }
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (meeting.round.load() == round) {
      if (std::chrono::steady_clock::now() > end) give_up("rank " + std::to_string(rank) + " waits for others in vain");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // Sends `sent[i]` of `from` to rank i and puts what rank i sent into `received[i]` of `to`.
  void exchange(const char* from, const std::vector<Piece>& sent, char* to, const std::vector<Piece>& received) {
    const std::string call = id + "." + std::to_string(calls_++) + ".";
    const size_t table = size * sizeof(Piece);
    size_t total = table;
    for (const Piece& piece : sent) total += piece.length;
    const std::string mine = call + std::to_string(rank);
    {
      const Shared out(mine, total, true);
      size_t at = table;
      for (uint32_t peer = 0; peer < size; ++peer) {
        const Piece place{at, sent[peer].length};
        std::memcpy(out.data() + peer * sizeof(Piece), &place, sizeof place);
        if (place.length) std::memcpy(out.data() + at, from + sent[peer].offset, place.length);
        at += place.length;
      }
    }
    meet();
    for (uint32_t peer = 0; peer < size; ++peer) {
      const Shared in(call + std::to_string(peer), 0, false);
      Piece place{};
      std::memcpy(&place, in.data() + rank * sizeof(Piece), sizeof place);
      if (place.length != received[peer].length) {
        give_up("rank " + std::to_string(rank) + " expects " + std::to_string(received[peer].length) +
                " bytes from rank " + std::to_string(peer) + ", which sent " + std::to_string(place.length));
      }
      if (place.length) std::memcpy(to + received[peer].offset, in.data() + place.offset, place.length);
    }
    meet();
    Shared::remove(mine);
  }

  // A message is a file that is renamed when it is complete. Each pair of ranks counts its own, in each direction.
  void send(const char* from, uint64_t length, uint32_t to) {
    const std::string name = message(rank, to, sent_[to]++);
    {
      const Shared out(name + ".part", length + 1, true);  // an empty file cannot be mapped
      std::memcpy(out.data(), from, length);
    }
    Shared::rename(name + ".part", name);
  }

  void receive(char* to, uint64_t length, uint32_t from) {
    const std::string name = message(from, rank, received_[from]++);
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (!Shared::exists(name)) {
      if (std::chrono::steady_clock::now() > end) give_up("waits in vain for " + name);
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    const Shared in(name, 0, false);
    if (in.size() != length + 1) give_up(name + " is not as long as what is received");
    std::memcpy(to, in.data(), length);
    Shared::remove(name);
  }

 private:
  std::string message(uint32_t from, uint32_t to, uint64_t number) const {
    return id + ".m" + std::to_string(from) + "-" + std::to_string(to) + "." + std::to_string(number);
  }

  Shared place_;
  uint64_t calls_ = 0;
  std::map<uint32_t, uint64_t> sent_, received_;
};

std::vector<Piece> pieces(const void* counts, const void* starts, uint32_t size, size_t item) {
  std::vector<Piece> found;
  for (uint32_t i = 0; i < size; ++i) {
    found.push_back({static_cast<const uint64_t*>(starts)[i] * item, static_cast<const uint64_t*>(counts)[i] * item});
  }
  return found;
}

std::vector<Piece> everywhere(uint32_t size, Piece piece) {
  return std::vector<Piece>(size, piece);
}

std::vector<Piece> rows(uint32_t size, uint64_t length) {
  std::vector<Piece> found;
  for (uint32_t i = 0; i < size; ++i) found.push_back({i * length, length});
  return found;
}

HcclResult submit(HcclComm handle, aclrtStream stream, std::vector<Piece> sent, std::vector<Piece> received,
                  const void* from, const void* to) {
  auto* group = static_cast<Group*>(handle);
  stream_of(stream).submit([=, sent = std::move(sent), received = std::move(received)] {
    group->exchange(static_cast<const char*>(from), sent, static_cast<char*>(const_cast<void*>(to)), received);
  });
  return HCCL_SUCCESS;
}

// ---- reductions

struct Reduction {
  uint64_t count;
  HcclDataType type;
  HcclReduceOp op;
};

struct Bfloat16 {
  uint16_t bits;

  float wide() const {
    const uint32_t word = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
  }
  // Rounds to the nearest, ties to even; a NaN keeps a bit, otherwise it would become infinite.
  static Bfloat16 nearest(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    if (std::isnan(value)) return {static_cast<uint16_t>(word >> 16 | 0x40)};
    return {static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
  }
};

template <typename T>
T combined(T a, T b, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM:
      return static_cast<T>(a + b);
    case HCCL_REDUCE_PROD:
      return static_cast<T>(a * b);
    case HCCL_REDUCE_MAX:
      return a < b ? b : a;
    case HCCL_REDUCE_MIN:
      return b < a ? b : a;
    default:
      give_up("reduction " + std::to_string(op));
  }
}

template <>
Bfloat16 combined(Bfloat16 a, Bfloat16 b, HcclReduceOp op) {
  return Bfloat16::nearest(combined(a.wide(), b.wide(), op));
}

template <typename T>
void reduce(char* into, const char* from, const Reduction& how) {
  auto* sums = reinterpret_cast<T*>(into);
  const auto* values = reinterpret_cast<const T*>(from);
  for (uint64_t i = 0; i < how.count; ++i) sums[i] = combined(sums[i], values[i], how.op);
}

auto reducer(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32:
      return reduce<float>;
    case HCCL_DATA_TYPE_FP64:
      return reduce<double>;
    case HCCL_DATA_TYPE_FP16:
      return reduce<_Float16>;
    case HCCL_DATA_TYPE_BFP16:
      return reduce<Bfloat16>;
    case HCCL_DATA_TYPE_INT64:
      return reduce<int64_t>;
    case HCCL_DATA_TYPE_INT32:
      return reduce<int32_t>;
    case HCCL_DATA_TYPE_INT16:
      return reduce<int16_t>;
    case HCCL_DATA_TYPE_INT8:
      return reduce<int8_t>;
    case HCCL_DATA_TYPE_UINT8:
      return reduce<uint8_t>;
    default:
      give_up("reduction of data type " + std::to_string(type));
  }
}

// Every rank takes all parts and adds them in the order of the ranks, so all get the same bits.
HcclResult submit_reduction(HcclComm handle, aclrtStream stream, std::vector<Piece> sent, const void* from, void* to,
                            Reduction how) {
  auto* group = static_cast<Group*>(handle);
  const auto add = reducer(how.type);
  stream_of(stream).submit([=, sent = std::move(sent)] {
    const uint64_t length = how.count * size_of(how.type);
    std::vector<char> parts(group->size * length);
    group->exchange(static_cast<const char*>(from), sent, parts.data(), rows(group->size, length));
    for (uint32_t rank = 1; rank < group->size; ++rank) add(parts.data(), parts.data() + rank * length, how);
    std::memcpy(to, parts.data(), length);
  });
  return HCCL_SUCCESS;
}

}  // namespace
}  // namespace stand_in

using namespace stand_in;  // NOLINT: the functions below are C

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* root) {
  static std::atomic<int> number{0};
  std::memset(root, 0, sizeof *root);
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  std::snprintf(root->internal, 96, "vapd-hccl-%d-%lld-%d", getpid(), static_cast<long long>(now), number++);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* root, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* out) {
  *out = new Group(root->internal, size, rank);
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* root, uint32_t rank, HcclComm* out) {
  return HcclCommInitRootInfoConfig(size, root, rank, nullptr, out);
}
HcclResult HcclCommDestroy(HcclComm handle) {
  delete static_cast<Group*>(handle);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm handle, char* name) {
  std::strcpy(name, static_cast<Group*>(handle)->id.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  *size = static_cast<Group*>(handle)->size;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = static_cast<Group*>(handle)->rank;
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult) {
  return "the stand-in for libhccl keeps no messages";
}
uint32_t HcclGetCommConfigCapability() {
  return 0;
}
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) {
  return HCCL_SUCCESS;
}

HcclResult HcclAlltoAllV(const void* from, const void* counts, const void* starts, HcclDataType type, const void* to,
                         const void* counts_in, const void* starts_in, HcclDataType type_in, HcclComm handle,
                         aclrtStream stream) {
  const uint32_t size = static_cast<Group*>(handle)->size;
  return submit(handle, stream, pieces(counts, starts, size, size_of(type)),
                pieces(counts_in, starts_in, size, size_of(type_in)), from, to);
}

HcclResult HcclAlltoAll(const void* from, uint64_t count, HcclDataType type, const void* to, uint64_t count_in,
                        HcclDataType type_in, HcclComm handle, aclrtStream stream) {
  const uint32_t size = static_cast<Group*>(handle)->size;
  return submit(handle, stream, rows(size, count * size_of(type)), rows(size, count_in * size_of(type_in)), from, to);
}

HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream stream) {
  const uint32_t size = static_cast<Group*>(handle)->size;
  const uint64_t length = count * size_of(type);
  return submit(handle, stream, everywhere(size, {0, length}), rows(size, length), from, to);
}

HcclResult HcclBroadcast(void* at, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
  const auto* group = static_cast<Group*>(handle);
  std::vector<Piece> sent(group->size, Piece{0, 0}), received(group->size, Piece{0, 0});
  if (group->rank == root) sent = everywhere(group->size, {0, count * size_of(type)});
  received[root] = {0, count * size_of(type)};
  return submit(handle, stream, std::move(sent), std::move(received), at, at);
}

HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                         aclrtStream stream) {
  const uint32_t size = static_cast<Group*>(handle)->size;
  return submit_reduction(handle, stream, everywhere(size, {0, count * size_of(type)}), from, to, {count, type, op});
}

HcclResult HcclReduceScatter(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                             aclrtStream stream) {
  const uint32_t size = static_cast<Group*>(handle)->size;
  return submit_reduction(handle, stream, rows(size, count * size_of(type)), from, to, {count, type, op});
}

HcclResult HcclSend(void* at, uint64_t count, HcclDataType type, uint32_t to, HcclComm handle, aclrtStream stream) {
  auto* group = static_cast<Group*>(handle);
  stream_of(stream).submit([=] { group->send(static_cast<char*>(at), count * size_of(type), to); });
  return HCCL_SUCCESS;
}

HcclResult HcclRecv(void* at, uint64_t count, HcclDataType type, uint32_t from, HcclComm handle, aclrtStream stream) {
  auto* group = static_cast<Group*>(handle);
  stream_of(stream).submit([=] { group->receive(static_cast<char*>(at), count * size_of(type), from); });
  return HCCL_SUCCESS;
}

// Sends first: sending waits for no rank, so no order of receipts can block.
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  for (const HcclSendRecvType kind : {HCCL_SEND, HCCL_RECV}) {
    const auto transfer = kind == HCCL_SEND ? HcclSend : HcclRecv;
    for (const HcclSendRecvItem* item = items; item < items + count; ++item) {
      if (item->sendRecvType != kind) continue;
      transfer(item->buf, item->count, item->dataType, item->remoteRank, handle, stream);
    }
  }
  return HCCL_SUCCESS;
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  auto* group = static_cast<Group*>(handle);
  stream_of(stream).submit([group] { group->meet(); });
  return HCCL_SUCCESS;
}

}  // extern "C"
