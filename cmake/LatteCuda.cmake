# Looks for nvcc. Sets LATTE_HAS_CUDA; without it everything but the CUDA kernels is built, and `latte info` says so.
set(LATTE_HAS_CUDA OFF)
if(LATTE_CUDA STREQUAL "OFF")
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(CMAKE_CUDA_COMPILER)
  # The kernels' own flags name the architecture; CMake must not add another.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  find_package(CUDAToolkit QUIET)
  if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12
     AND TARGET CUDA::cudart_static)
    set(LATTE_HAS_CUDA ON)
  endif()
endif()

if(LATTE_HAS_CUDA)
  message(STATUS "latte: CUDA backend with nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
elseif(LATTE_CUDA STREQUAL "ON")
  message(FATAL_ERROR "LATTE_CUDA=ON needs nvcc 12 or newer (CMAKE_CUDA_COMPILER) and its static run-time library")
else()
  message(STATUS "latte: no nvcc 12 or newer found, building without the CUDA backend")
endif()
