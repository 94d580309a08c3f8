/* kvk/cuda.h declares the driver's structures itself: they are those of the headers of the CUDA toolkit. Built where
 * there is one. */
#include "kvk/cuda.h"

#include "kv_cmocka.h"

#include <cuda.h>

#define SAME(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs) && _Alignof(ours) == _Alignof(theirs), #theirs)
#define SAME_PLACE(ours, member, theirs, their_member)                                                                 \
	_Static_assert(offsetof(ours, member) == offsetof(theirs, their_member) &&                                     \
			       sizeof(((ours *)0)->member) == sizeof(((theirs *)0)->their_member),                     \
		       #theirs "." #their_member)
#define SAME_NUMBER(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SAME(kvk_cu_ptr_t, CUdeviceptr);
SAME(kvk_cu_memory_t, CUmemGenericAllocationHandle);
SAME(int, CUdevice);
SAME(kvk_cu_uuid_t, CUuuid);

SAME(kvk_cu_location_t, CUmemLocation);
SAME_PLACE(kvk_cu_location_t, type, CUmemLocation, type);
SAME_PLACE(kvk_cu_location_t, id, CUmemLocation, id);
SAME_NUMBER(KVK_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);

SAME(kvk_cu_memory_prop_t, CUmemAllocationProp);
SAME_PLACE(kvk_cu_memory_prop_t, type, CUmemAllocationProp, type);
SAME_PLACE(kvk_cu_memory_prop_t, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_PLACE(kvk_cu_memory_prop_t, location, CUmemAllocationProp, location);
SAME_PLACE(kvk_cu_memory_prop_t, windows, CUmemAllocationProp, win32HandleMetaData);
SAME_PLACE(kvk_cu_memory_prop_t, flags, CUmemAllocationProp, allocFlags);
SAME_PLACE(kvk_cu_memory_prop_t, flags.compression, CUmemAllocationProp, allocFlags.compressionType);
SAME_PLACE(kvk_cu_memory_prop_t, flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
SAME_PLACE(kvk_cu_memory_prop_t, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME_NUMBER(KVK_CU_MEMORY_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_NUMBER(KVK_CU_HANDLE_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME_NUMBER(KVK_CU_GRAIN_BEST, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);

SAME(kvk_cu_access_t, CUmemAccessDesc);
SAME_PLACE(kvk_cu_access_t, location, CUmemAccessDesc, location);
SAME_PLACE(kvk_cu_access_t, flags, CUmemAccessDesc, flags);
SAME_NUMBER(KVK_CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

/* The functions as the headers declare them, with their types in place of ours, under the names that are looked up:
 * each line compiles only if it fits. */
#define SAME_FUNCTION(symbol, ...)                                                                                     \
	_Static_assert(__builtin_types_compatible_p(__typeof__(&symbol), CUresult (*)(__VA_ARGS__)), #symbol)
SAME_FUNCTION(cuMemCreate, CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
SAME_FUNCTION(cuMemRelease, CUmemGenericAllocationHandle);
SAME_FUNCTION(cuMemExportToShareableHandle, void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
	      unsigned long long);
SAME_FUNCTION(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
SAME_FUNCTION(cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
SAME_FUNCTION(cuMemAddressFree, CUdeviceptr, size_t);
SAME_FUNCTION(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
SAME_FUNCTION(cuMemUnmap, CUdeviceptr, size_t);
SAME_FUNCTION(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
SAME_FUNCTION(cuMemGetAllocationGranularity, size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
SAME_FUNCTION(cuDeviceGetUuid_v2, CUuuid *, CUdevice);
SAME_FUNCTION(cuMemsetD8_v2, CUdeviceptr, unsigned char, size_t);
SAME_FUNCTION(cuMemGetInfo_v2, size_t *, size_t *);
SAME_FUNCTION(cuCtxSynchronize, void);

/* An access for one device, written as ours and read as theirs. */
KV_TEST(structures_are_read_by_the_driver_as_they_were_written)
{
	const kvk_cu_memory_prop_t prop = {.type = KVK_CU_MEMORY_PINNED,
					   .handle_types = KVK_CU_HANDLE_FD,
					   .location = {.type = KVK_CU_LOCATION_DEVICE, .id = 7}};
	CUmemAllocationProp theirs, expected = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
						.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
						.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 7}};
	const kvk_cu_access_t access = {.location = {.type = KVK_CU_LOCATION_DEVICE, .id = 7},
					.flags = KVK_CU_ACCESS_READ_WRITE};
	CUmemAccessDesc theirs_access;

	memcpy(&theirs, &prop, sizeof theirs);
	assert_memory_equal(&theirs, &expected, sizeof theirs);
	memcpy(&theirs_access, &access, sizeof theirs_access);
	assert_int_equal(theirs_access.location.type, CU_MEM_LOCATION_TYPE_DEVICE);
	assert_int_equal(theirs_access.location.id, 7);
	assert_int_equal(theirs_access.flags, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
	assert_int_equal(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 102);
	assert_int_equal(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 103);
}
