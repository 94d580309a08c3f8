# Write OUT with what git says of SOURCE, if it has changed: cmake -DSOURCE=DIR -DOUT=FILE -DREVISION=TEXT -P revision.cmake
# A tree that is no git work tree of its own has no revision; REVISION (of a package) takes its place.
if(REVISION STREQUAL "")
	execute_process(COMMAND git -C "${SOURCE}" rev-parse --show-cdup OUTPUT_VARIABLE up ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
	if(NOT failed AND up STREQUAL "")
		execute_process(COMMAND git -C "${SOURCE}" describe --always --dirty --abbrev=12 OUTPUT_VARIABLE REVISION ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
	endif()
endif()
file(CONFIGURE OUTPUT "${OUT}" CONTENT "#define KV_REVISION \"${REVISION}\"\n")
