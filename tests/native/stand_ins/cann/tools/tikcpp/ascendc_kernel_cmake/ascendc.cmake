# SPDX-License-Identifier: Apache-2.0
# Replaces CANN's module: `ascendc_library` compiles the kernels' source for the emulated cores and adds the launchers,
# so that csrc/npu/CMakeLists.txt itself can be run. STAND_IN_LIBRARIES names the folder of libascendcl.so.
set(_stand_ins "${CMAKE_CURRENT_LIST_DIR}/../../../..")

function(ascendc_library target type)
  foreach(source ${ARGN})
    if(NOT EXISTS "${source}")
      message(FATAL_ERROR "ascendc_library: there is no ${source}")
    endif()
  endforeach()
  add_library(${target} ${type} "${_stand_ins}/launch.cpp")  # which includes the kernels' source
  target_include_directories(${target} PRIVATE "${_stand_ins}/../emulation" "${_stand_ins}/../../../csrc")
  target_include_directories(${target} SYSTEM PRIVATE "${TORCH_NPU_DIR}/include" "${TORCH_NPU_DIR}/include/third_party/acl/inc")
  target_link_directories(${target} PUBLIC "$ENV{STAND_IN_LIBRARIES}")
endfunction()
