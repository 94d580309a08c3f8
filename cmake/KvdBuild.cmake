# Language, warnings, sanitizers, and how a library, a program and a test of kvd are declared.
option(KVD_WERROR "Treat warnings as errors" ON)
set(KVD_SANITIZE "" CACHE STRING "Sanitizers: address,undefined or thread; empty: none")
option(KVD_COVERAGE "Build for coverage" OFF)
option(KVD_FUZZ "Build the libFuzzer targets (clang only)" OFF)

set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS ON)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
if(NOT CMAKE_BUILD_TYPE)
	set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

add_compile_definitions(_GNU_SOURCE KVD_VERSION="${PROJECT_VERSION}")
add_compile_options(-Wall -Wextra -Wpedantic -Wconversion -Wstrict-prototypes -fno-strict-aliasing)
if(KVD_WERROR)
	add_compile_options(-Werror)
endif()
if(KVD_SANITIZE)
	add_compile_options(-fsanitize=${KVD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
	add_link_options(-fsanitize=${KVD_SANITIZE})
	add_compile_definitions(KVD_SANITIZE=1)
	if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
		add_compile_options(-Wno-tsan) # a fence it does not model orders non-temporal stores, not threads
		add_compile_options(-Wno-maybe-uninitialized -Wno-format-truncation) # guesses about instrumented code; of plain code the release build says them
	endif()
endif()
if(KVD_FUZZ)
	add_compile_options(-fsanitize=fuzzer-no-link) # coverage of the code under test, not of the fuzzer alone
endif()
if(KVD_COVERAGE)
	add_compile_options(--coverage -fprofile-update=atomic) # threads count the same lines
	add_link_options(--coverage)
endif()

# kvd_test(NAME core.lease SOURCES a.c LIBS kvd_core [LABELS ...] [TIMEOUT s] [ARGS ...])
# A program without a main() has that of tests/kv_main.c, which runs its tests.
# Tests are named after what they defend, are cmocka programs or scripts' drivers, and skip with exit code 77 and a reason. TIMEOUT (60) is for a machine that
# does nothing else, under the slowest sanitizer; one with load 30 takes 15 times as long, and a hang is no less a hang after that.
# Those with the longest limit start first (COST): at the end of a run nothing waits for one of them.
function(kvd_test)
	cmake_parse_arguments(T "" "NAME;TIMEOUT" "SOURCES;LIBS;LABELS;ARGS" ${ARGN})
	string(REPLACE "." "_" target "test_${T_NAME}")
	add_executable(${target} ${T_SOURCES})
	target_link_libraries(${target} PRIVATE ${T_LIBS} kv_test_main PkgConfig::CMOCKA)
	target_include_directories(${target} PRIVATE "${CMAKE_SOURCE_DIR}/tests")
	add_test(NAME ${T_NAME} COMMAND ${target} ${T_ARGS})
	if(NOT T_TIMEOUT)
		set(T_TIMEOUT 60)
	endif()
	math(EXPR T_TIMEOUT "15 * ${T_TIMEOUT}")
	set_tests_properties(${T_NAME} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${T_TIMEOUT} COST ${T_TIMEOUT} LABELS "${T_LABELS}")
endfunction()

# kvd_fuzzer(NAME frame SOURCES x.c LIBS kv_common): libFuzzer program fuzz_<name>, corpus in tests/fuzz/corpus/<name>. Without KVD_FUZZ the
# same program replays and mutates the seeds (tests/fuzz/replay.c), as test fuzz.<name>.
function(kvd_fuzzer)
	cmake_parse_arguments(F "" "NAME" "SOURCES;LIBS" ${ARGN})
	if(KVD_FUZZ)
		add_executable(fuzz_${F_NAME} ${F_SOURCES})
		target_compile_options(fuzz_${F_NAME} PRIVATE -fsanitize=fuzzer)
		target_link_options(fuzz_${F_NAME} PRIVATE -fsanitize=fuzzer)
		set_property(GLOBAL APPEND PROPERTY KVD_FUZZERS ${F_NAME})
	else()
		add_executable(fuzz_${F_NAME} ${F_SOURCES} "${CMAKE_SOURCE_DIR}/tests/fuzz/replay.c")
		target_include_directories(fuzz_${F_NAME} PRIVATE "${CMAKE_SOURCE_DIR}/tests")
		add_test(NAME fuzz.${F_NAME} COMMAND fuzz_${F_NAME} "${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${F_NAME}")
		set_tests_properties(fuzz.${F_NAME} PROPERTIES TIMEOUT 1800 LABELS fuzz)
	endif()
	target_link_libraries(fuzz_${F_NAME} PRIVATE ${F_LIBS})
endfunction()
