# What every target of ours has in common. Nothing here reaches a consumer of the library.

add_library(latte_options INTERFACE)
target_compile_features(latte_options INTERFACE cxx_std_20)
# nvcc takes none of these as they are; src/cuda has its own.
target_compile_options(latte_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wshadow>)
# Not where latte is part of somebody else's build, which may have a compiler that warns of more.
if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(latte_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Werror>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Designated initialisers leave fields to their defaults on purpose; only g++ minds. -Wrestrict of g++ 12 reports
  # std::string's own operator+ (GCC bug 105329).
  target_compile_options(latte_options
                         INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:-Wno-missing-field-initializers -Wno-restrict>)
endif()
if(LATTE_SANITIZE)
  # A report is a failure: undefined behaviour must not scroll by.
  set(latte_sanitize_flags -fsanitize=${LATTE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(latte_options INTERFACE $<$<COMPILE_LANGUAGE:C,CXX>:${latte_sanitize_flags}>)
  target_link_options(latte_options INTERFACE ${latte_sanitize_flags})
endif()

# Our rooms include each other as "room/file.hpp".
add_library(latte_rooms INTERFACE)
target_include_directories(latte_rooms INTERFACE "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(latte_rooms INTERFACE latte_options)

# latte_sources(<variable> <pattern>...): the files of this directory that match; new ones are seen by the next build.
function(latte_sources variable)
  list(TRANSFORM ARGN PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/" OUTPUT_VARIABLE patterns)
  file(GLOB found CONFIGURE_DEPENDS ${patterns})
  set(${variable} ${found} PARENT_SCOPE)
endfunction()
