// comm_nccl_api.h compared with NCCL's header, if that is installed: equal constants and compatible functions.
#if __has_include(<nccl.h>)
#include <nccl.h>

#include <type_traits>

#include "llmc/parallel/comm/comm_nccl_api.h"

namespace {

using namespace nccl_api;

static_assert(kSuccess == int{ncclSuccess} && kInvalidArgument == int{ncclInvalidArgument});
static_assert(kInvalidUsage == int{ncclInvalidUsage} && kRemoteError == int{ncclRemoteError});
static_assert(kInProgress == int{ncclInProgress});
static_assert(kUint8 == int{ncclUint8} && kInt32 == int{ncclInt32} && kUint32 == int{ncclUint32});
static_assert(kFloat32 == int{ncclFloat32} && kFloat64 == int{ncclFloat64});
static_assert(kSum == int{ncclSum} && kMax == int{ncclMax});
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(sizeof(Result) == sizeof(ncclResult_t) && sizeof(Type) == sizeof(ncclDataType_t));
static_assert(sizeof(Reduction) == sizeof(ncclRedOp_t));

// The class of a value in the calling convention: a pointer, an integer of some size, the 128 bytes of an id.
template <size_t bytes> struct Integer {};
template <size_t bytes> struct Block {};
template <typename T>
using Kind = std::conditional_t<std::is_pointer_v<T>, void*,
                                std::conditional_t<std::is_class_v<T>, Block<sizeof(T)>, Integer<sizeof(T)>>>;
template <typename F> struct Shape;
template <typename R, typename... A> struct Shape<R (*)(A...)> {
    using type = Kind<R>(Kind<A>...);
};
template <typename A, typename B>
constexpr bool kAlike = std::is_same_v<typename Shape<A>::type, typename Shape<B>::type>;

static_assert(kAlike<decltype(Functions::get_version), decltype(&ncclGetVersion)>);
static_assert(kAlike<decltype(Functions::get_unique_id), decltype(&ncclGetUniqueId)>);
static_assert(kAlike<decltype(Functions::comm_init_rank), decltype(&ncclCommInitRank)>);
static_assert(kAlike<decltype(Functions::comm_destroy), decltype(&ncclCommDestroy)>);
static_assert(kAlike<decltype(Functions::comm_abort), decltype(&ncclCommAbort)>);
static_assert(kAlike<decltype(Functions::comm_get_async_error), decltype(&ncclCommGetAsyncError)>);
static_assert(kAlike<decltype(Functions::get_error_string), decltype(&ncclGetErrorString)>);
static_assert(kAlike<decltype(Functions::get_last_error), decltype(&ncclGetLastError)>);
static_assert(kAlike<decltype(Functions::all_reduce), decltype(&ncclAllReduce)>);
static_assert(kAlike<decltype(Functions::reduce_scatter), decltype(&ncclReduceScatter)>);
static_assert(kAlike<decltype(Functions::all_gather), decltype(&ncclAllGather)>);
static_assert(kAlike<decltype(Functions::send), decltype(&ncclSend)>);
static_assert(kAlike<decltype(Functions::recv), decltype(&ncclRecv)>);
static_assert(kAlike<decltype(Functions::group_start), decltype(&ncclGroupStart)>);
static_assert(kAlike<decltype(Functions::group_end), decltype(&ncclGroupEnd)>);

}  // namespace
#endif
