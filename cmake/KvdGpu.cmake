# GPU kernels: nvcc makes one file of machine code (sm_80, sm_90, and PTX for what comes after) that becomes a part of the library. CUDA is no
# requirement: without an nvcc that works the library is built without kernels and says so at run time. -DKVD_NVCC=path names another.
option(KVD_GPU "Build the GPU kernels where there is an nvcc" ON)
set(KVD_NVCC_EXTRA "" CACHE STRING "More flags of nvcc, as -lineinfo")
find_program(KVD_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin DOC "CUDA compiler")
set(KVD_NVCC_SM_80 -gencode arch=compute_80,code=sm_80)
set(KVD_NVCC_SM_90 -gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90)
set(KVD_NVCC_SM_90A -gencode arch=compute_90a,code=sm_90a) # matrix instructions of a warp group
set(KVD_NVCC_FLAGS -fatbin -std=c++17 -O3 ${KVD_NVCC_EXTRA})

# Does it compile? It needs a C++ compiler that it likes, and has to know the architectures. Asked once for each nvcc and set of flags.
function(kvd_nvcc_works result)
	set(asked "${KVD_NVCC} ${KVD_NVCC_FLAGS} ${KVD_NVCC_SM_80} ${KVD_NVCC_SM_90}")
	if(NOT "${KVD_NVCC_ASKED}" STREQUAL "${asked}")
		set(probe "${CMAKE_BINARY_DIR}/CMakeFiles/kvd_nvcc.cu")
		file(WRITE "${probe}" "extern \"C\" __global__ void probe(int *p) { *p = 1; }\n")
		execute_process(COMMAND "${KVD_NVCC}" ${KVD_NVCC_FLAGS} ${KVD_NVCC_SM_80} ${KVD_NVCC_SM_90} -o "${probe}.fatbin" "${probe}" RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
		set(KVD_NVCC_FAILED "${failed}" CACHE INTERNAL "")
		set(KVD_NVCC_ASKED "${asked}" CACHE INTERNAL "")
	endif()
	if("${KVD_NVCC_FAILED}" STREQUAL "0")
		set(${result} ON PARENT_SCOPE)
	else()
		set(${result} OFF PARENT_SCOPE)
	endif()
endfunction()

# kvd_gpu_image(TARGET image.c kernels.cu NAME ARCHITECTURE...): compile the kernels and give image.c their path as NAME.
function(kvd_gpu_image target image kernels name_of_path)
	set(source "${CMAKE_CURRENT_SOURCE_DIR}/${kernels}")
	get_filename_component(name "${kernels}" NAME)
	set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/${name}.fatbin")
	if(NOT KVD_GPU OR NOT KVD_NVCC)
		message(STATUS "GPU kernels: none (no nvcc, or KVD_GPU is off)")
		return()
	endif()
	kvd_nvcc_works(works)
	if(NOT works)
		message(STATUS "GPU kernels: none (${KVD_NVCC} cannot compile for sm_80 and sm_90)")
		return()
	endif()
	add_custom_command(OUTPUT "${fatbin}"
		COMMAND "${KVD_NVCC}" ${KVD_NVCC_FLAGS} ${ARGN} -I "${CMAKE_CURRENT_SOURCE_DIR}" -I "${CMAKE_CURRENT_SOURCE_DIR}/include" -I "${CMAKE_SOURCE_DIR}/common/include"
			-MD -MF "${fatbin}.d" -MT "${fatbin}" -o "${fatbin}" "${source}"
		DEPENDS "${source}" DEPFILE "${fatbin}.d" COMMENT "Compiling GPU kernels ${kernels}" VERBATIM)
	target_sources(${target} PRIVATE "${fatbin}")
	set_source_files_properties("${fatbin}" PROPERTIES GENERATED ON HEADER_FILE_ONLY ON)
	set_property(SOURCE "${image}" APPEND PROPERTY OBJECT_DEPENDS "${fatbin}")
	set_property(SOURCE "${image}" APPEND PROPERTY COMPILE_DEFINITIONS "${name_of_path}=\"${fatbin}\"")
	message(STATUS "GPU kernels: ${kernels} by ${KVD_NVCC}")
endfunction()
