# MXATTN_CUDA = AUTO | ON | OFF. Sets MXATTN_HAS_CUDA, and MXATTN_CUDA_INCLUDE where the toolkit's
# headers lie (also when device code is off: host tests compare with its conversions).
#
# mxattn_cuda_test(NAME <room> SOURCES ... [DEPENDS <rooms> ...]) makes mxattn_<room>_device_test, a
# GoogleTest program that needs no shared library of ours and none of the toolkit's: it can be
# copied to a machine that has a driver and nothing else but the libraries that it finds beside
# itself. Without CUDA it makes nothing.
#
# What ptxas says of every kernel is kept beside its object file: tools/check_cuda_build reads it.

set(MXATTN_CUDA AUTO CACHE STRING "Build device code: AUTO (if nvcc is found), ON or OFF")
set_property(CACHE MXATTN_CUDA PROPERTY STRINGS AUTO ON OFF)
option(MXATTN_DEVICE_DEBUG "Device code traps where it would wait for ever" OFF)
set(MXATTN_HAS_CUDA FALSE)

if(MXATTN_SANITIZE AND MXATTN_CUDA STREQUAL "AUTO")
  message(STATUS "CUDA: off, the sanitizers look at host code")
elseif(MXATTN_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # The "a" targets: their matrix instructions exist on that architecture alone, so there is no
    # PTX for later ones to fall back on.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 90a-real 100a-real 103a-real)
    endif()
    enable_language(CUDA)
    # CMake before 3.26 does not know that nvcc takes C++20.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    # By its own first line: the Python of ./dev test is another one than that of ./dev demo, and
    # another command would compile everything again.
    find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)
    set(CMAKE_CUDA_COMPILER_LAUNCHER
        ${PROJECT_SOURCE_DIR}/tools/check_cuda_build --keep
        ${CMAKE_CUDA_COMPILER_LAUNCHER})
    set(MXATTN_HAS_CUDA TRUE)
  elseif(MXATTN_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA: off, no nvcc found")
  else()
    message(FATAL_ERROR "MXATTN_CUDA=${MXATTN_CUDA}, but no working nvcc was found")
  endif()
endif()

find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND)
  find_path(MXATTN_CUDA_INCLUDE cuda_fp4.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
endif()

function(mxattn_cuda_test)
  cmake_parse_arguments(ROOM "" "NAME" "SOURCES;DEPENDS" ${ARGN})
  if(NOT MXATTN_HAS_CUDA OR NOT MXATTN_BUILD_TESTS)
    return()
  endif()
  set(target mxattn_${ROOM_NAME}_device_test)
  add_executable(${target} ${ROOM_SOURCES} ${PROJECT_SOURCE_DIR}/tests/support/device_main.cc)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${target} PRIVATE mxattn_${ROOM_NAME} GTest::gtest)
  foreach(room IN LISTS ROOM_DEPENDS)
    target_link_libraries(${target} PRIVATE mxattn_${room})
  endforeach()
  set_target_properties(${target} PROPERTIES BUILD_RPATH "$ORIGIN")
  add_test(NAME ${ROOM_NAME}_device COMMAND ${target})
  # device_main.cc: some cases skipped, none failed.
  set_tests_properties(${ROOM_NAME}_device PROPERTIES SKIP_RETURN_CODE 77)
endfunction()
