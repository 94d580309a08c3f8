# Every package kvd builds with, as imported targets; scripts/deps.sh installs them on Debian 12. Gotchas: docs/decisions.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
pkg_check_modules(URING REQUIRED IMPORTED_TARGET liburing>=2.3)
pkg_check_modules(ROCKSDB REQUIRED IMPORTED_TARGET rocksdb>=7.8)
pkg_check_modules(MSGPACK REQUIRED IMPORTED_TARGET msgpack>=4.0)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash>=0.8)
pkg_check_modules(CRYPTO REQUIRED IMPORTED_TARGET libcrypto>=3.0)
pkg_check_modules(SSL REQUIRED IMPORTED_TARGET libssl>=3.0) # kvd-net, and kvd-bench
pkg_check_modules(MHD REQUIRED IMPORTED_TARGET libmicrohttpd>=0.9.75)
pkg_check_modules(YAML REQUIRED IMPORTED_TARGET yaml-0.1>=0.2)
pkg_check_modules(ZMQ REQUIRED IMPORTED_TARGET libzmq>=4.3) # kvd-pd-proxy, and subscribers of the tests
pkg_check_modules(JSONC REQUIRED IMPORTED_TARGET json-c>=0.16)
pkg_check_modules(CURL REQUIRED IMPORTED_TARGET libcurl>=7.85)
pkg_check_modules(UCX IMPORTED_TARGET ucx>=1.13) # headers only, and without them blocks go over TLS alone: kvd-net looks for the library when it starts
if(BUILD_TESTING)
	pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka>=1.1.5)
endif()
