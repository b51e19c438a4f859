# cmake -DBUILD=<build folder> -DSOURCE=<this folder> -P run.cmake
# Installs into a folder of the build and builds the program there against it.
set(work ${BUILD}/package_test)
file(REMOVE_RECURSE ${work})
function(step)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE text ERROR_VARIABLE text
                  RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${ARGN}\n${text}")
  endif()
endfunction()
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
step(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/build -DCMAKE_PREFIX_PATH=${work}/prefix)
step(${CMAKE_COMMAND} --build ${work}/build)
step(${work}/build/package_test)
if(EXISTS ${work}/prefix/bin/mxattn)
  step(${work}/prefix/bin/mxattn demo --recipe fp8 --json)
endif()
