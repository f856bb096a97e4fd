// SPDX-License-Identifier: Apache-2.0
// libopapi with two operators: aclnnInplaceCopy, which torch_npu calls for copies within a device that are not
// contiguous (same dtype on both sides, any strides), and aclnnInplaceZero.
#include <acl/acl_base.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "streams.h"

struct aclTensor {
  std::vector<int64_t> sizes, strides;
  char* data;  // address of the first element
  aclDataType type;
};

namespace {

size_t size_of(aclDataType type) {
  switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
      return 1;
    case ACL_INT16:
    case ACL_UINT16:
    case ACL_FLOAT16:
    case ACL_BF16:
      return 2;
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_FLOAT:
      return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
      return 8;
    default:
      std::fprintf(stderr, "stand-in for libopapi: data type %d\n", static_cast<int>(type));
      std::_Exit(73);
  }
}

struct Executor {
  aclTensor dst, src;
};

void clear(const aclTensor& tensor, size_t dimension, char* at) {
  const size_t item = size_of(tensor.type);
  if (dimension == tensor.sizes.size()) {
    std::memset(at, 0, item);
    return;
  }
  for (int64_t i = 0; i < tensor.sizes[dimension]; ++i) {
    clear(tensor, dimension + 1, at + i * tensor.strides[dimension] * static_cast<int64_t>(item));
  }
}

void copy(const Executor& job, size_t dimension, char* dst, const char* src) {
  const size_t item = size_of(job.dst.type);
  if (dimension == job.dst.sizes.size()) {
    std::memcpy(dst, src, item);
    return;
  }
  for (int64_t i = 0; i < job.dst.sizes[dimension]; ++i) {
    copy(job, dimension + 1, dst + i * job.dst.strides[dimension] * static_cast<int64_t>(item),
         src + i * job.src.strides[dimension] * static_cast<int64_t>(item));
  }
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t count, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* data) {
  return new aclTensor{{sizes, sizes + count},
                       {strides, strides + count},
                       static_cast<char*>(data) + offset * static_cast<int64_t>(size_of(type)),
                       type};
}

int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return 0;
}

int aclnnInplaceCopyGetWorkspaceSize(const aclTensor* dst, const aclTensor* src, uint64_t* workspace, void** executor) {
  if (dst->type != src->type || dst->sizes != src->sizes) {
    std::fprintf(stderr, "stand-in for libopapi: this copy converts or broadcasts\n");
    std::_Exit(73);
  }
  *workspace = 0;
  *executor = new Executor{*dst, *src};
  return 0;
}

int aclnnInplaceCopy(void*, uint64_t, void* executor, void* stream) {
  stand_in::stream_of(stream).submit([job = static_cast<Executor*>(executor)] {
    copy(*job, 0, job->dst.data, job->src.data);
    delete job;
  });
  return 0;
}

int aclnnInplaceZeroGetWorkspaceSize(const aclTensor* tensor, uint64_t* workspace, void** executor) {
  *workspace = 0;
  *executor = new aclTensor(*tensor);
  return 0;
}

int aclnnInplaceZero(void*, uint64_t, void* executor, void* stream) {
  stand_in::stream_of(stream).submit([tensor = static_cast<aclTensor*>(executor)] {
    clear(*tensor, 0, tensor->data);
    delete tensor;
  });
  return 0;
}

}  // extern "C"
