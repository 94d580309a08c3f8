# GPU kernels: nvcc makes one file of machine code (sm_80, sm_90, and PTX for what comes after) that becomes a part of the library. CUDA is no
# requirement: without nvcc the library is built without kernels and says so at run time. -DKVD_NVCC=... names another, -DKVD_NVCC="" none.
find_program(KVD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin DOC "CUDA compiler; empty: no GPU kernels")
set(KVD_NVCC_FLAGS -std=c++17 -O3 -lineinfo
	-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90
	CACHE STRING "Flags of nvcc")

# kvd_gpu_image(TARGET image.c kernels.cu): compile the kernels and give image.c their path as KVK_GPU_FATBIN.
function(kvd_gpu_image target image kernels)
	set(source "${CMAKE_CURRENT_SOURCE_DIR}/${kernels}")
	set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/${kernels}.fatbin")
	if(NOT KVD_NVCC)
		message(STATUS "GPU kernels: none (no nvcc)")
		return()
	endif()
	if(NOT EXISTS "${source}")
		message(STATUS "GPU kernels: none (no ${kernels})")
		return()
	endif()
	add_custom_command(OUTPUT "${fatbin}"
		COMMAND "${KVD_NVCC}" -fatbin ${KVD_NVCC_FLAGS} -I "${CMAKE_CURRENT_SOURCE_DIR}" -MD -MF "${fatbin}.d" -MT "${fatbin}" -o "${fatbin}" "${source}"
		DEPENDS "${source}"
		DEPFILE "${fatbin}.d"
		COMMENT "Compiling GPU kernels ${kernels}" VERBATIM)
	target_sources(${target} PRIVATE "${fatbin}")
	set_source_files_properties("${fatbin}" PROPERTIES GENERATED ON HEADER_FILE_ONLY ON)
	set_source_files_properties("${image}" PROPERTIES OBJECT_DEPENDS "${fatbin}" COMPILE_DEFINITIONS "KVK_GPU_FATBIN=\"${fatbin}\"")
	message(STATUS "GPU kernels: ${kernels} by ${KVD_NVCC}")
endfunction()
