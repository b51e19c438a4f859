# mxattn_room(NAME <room> [SOURCES ...] [DEPENDS <rooms> ...] [LIBRARIES ...] [TESTS ...])
#
# One room, one target mxattn_<room>; the rooms it depends on are the only ones it links, and
# tools/check_layers holds its includes to the same list. Rooms of device code are left out of a
# build without nvcc. TESTS lie beside the code they test and become one program, mxattn_<room>_test.

# Looked up here, so that every room and whoever links one sees the imported targets.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(hwy REQUIRED)  # SIMD with run-time dispatch

add_library(mxattn_options INTERFACE)
# Every rounding is written out, no compiler may fuse a multiply and an add: -ffp-contract=off, and
# --fmad=false on the device. --expt-relaxed-constexpr: device code calls constexpr functions.
# Headers of the toolkit have parameters that nobody uses.
target_compile_options(mxattn_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr --fmad=false -Xptxas=-v
                             -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-ffp-contract=off>)
if(MXATTN_WERROR)
  target_compile_options(mxattn_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Werror>
    $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
endif()
if(MXATTN_SANITIZE)
  target_compile_options(mxattn_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-sanitize-recover=all -g>)
  target_link_options(mxattn_options INTERFACE -fsanitize=address,undefined)
endif()
target_include_directories(mxattn_options INTERFACE ${PROJECT_SOURCE_DIR}/include)

if(MXATTN_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()

function(mxattn_room)
  cmake_parse_arguments(ROOM "" "NAME" "SOURCES;DEPENDS;LIBRARIES;TESTS" ${ARGN})
  set(target mxattn_${ROOM_NAME})
  if(ROOM_SOURCES)
    add_library(${target} STATIC ${ROOM_SOURCES})
    set(scope PUBLIC)
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(${target} ${scope} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${target} ${scope} mxattn_options ${ROOM_LIBRARIES})
  foreach(room IN LISTS ROOM_DEPENDS)
    if(MXATTN_HAS_CUDA OR TARGET mxattn_${room})
      target_link_libraries(${target} ${scope} mxattn_${room})
    endif()
  endforeach()

  if(MXATTN_BUILD_TESTS AND ROOM_TESTS)
    add_executable(${target}_test ${ROOM_TESTS})
    target_include_directories(${target}_test PRIVATE ${PROJECT_SOURCE_DIR}/tests)
    target_link_libraries(${target}_test PRIVATE ${target} GTest::gtest_main)
    add_test(NAME ${ROOM_NAME} COMMAND ${target}_test)
  endif()
endfunction()
