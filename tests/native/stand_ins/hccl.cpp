// SPDX-License-Identifier: Apache-2.0
// libhccl for several processes on one machine: every rank publishes what it sends in shared memory, meets the others,
// and takes what is for it. Runs on the stream it is given, as the real one does.
#include <fcntl.h>
#include <hccl/hccl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
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

// A file in /dev/shm, mapped.
class Shared {
 public:
  Shared(const std::string& name, size_t size, bool create) {
    const std::string path = "/dev/shm/" + name;
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
  static void remove(const std::string& name) { unlink(("/dev/shm/" + name).c_str()); }

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

// What goes to each rank: offset and length in bytes.
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

  // Waits until all ranks are here. A rank that never comes ends the process: a test must not hang.
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

 private:
  Shared place_;
  uint64_t calls_ = 0;
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

// Adds nothing up: enough for a barrier, which torch makes of an all-reduce.
HcclResult HcclAllReduce(void* from, void* to, uint64_t count, HcclDataType type, HcclReduceOp, HcclComm handle,
                         aclrtStream stream) {
  const uint32_t size = static_cast<Group*>(handle)->size;
  const Piece all{0, count * size_of(type)};
  return submit(handle, stream, everywhere(size, all), everywhere(size, all), from, to);
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  auto* group = static_cast<Group*>(handle);
  stream_of(stream).submit([group] { group->meet(); });
  return HCCL_SUCCESS;
}

}  // extern "C"
